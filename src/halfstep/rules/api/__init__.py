"""Deprecated spellings and wrong arguments."""
