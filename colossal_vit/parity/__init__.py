"""`--parity`: whether layouts compute what one process does, and where they do not."""
