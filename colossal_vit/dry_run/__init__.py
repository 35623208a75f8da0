"""What each rank holds and sends in a step, before it runs: `--dry-run`."""
