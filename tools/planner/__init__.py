"""Which layout of a training is the fastest: predicted for GPUs by their data sheets, or measured on this machine."""
