"""Whether layouts compute what one process does, and where they do not."""
