"""Commands that look at what a train script trains: `python -m tools.NAME SCRIPT --config FILE`, from the root."""
