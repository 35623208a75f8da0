"""What a step holds, sends and takes, before it runs: dry runs, and the search for the fastest layouts."""
