"""What each rank holds and sends in a step, before it runs: `--dry-run`."""

import colossal_vit.compat  # noqa: F401 imports Colossal-AI
