"""Starting and ending processes: command line, launchers, process groups, exit codes."""

import colossal_vit.compat  # noqa: F401 imports Colossal-AI
