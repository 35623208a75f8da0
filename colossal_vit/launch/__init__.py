"""Starting and ending processes: command line, launchers, process groups, exit codes."""
