"""The state of a run to disk and back, in any layout."""
