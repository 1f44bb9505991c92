"""Numbers that do not fit their format."""
