"""Turns a plain loop into a mixed-precision, accumulating, distributed one: text edits at the places that were imagined."""
