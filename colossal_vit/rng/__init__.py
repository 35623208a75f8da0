"""Random numbers that are functions of what they are for, never of rank, layout or what was drawn before."""
