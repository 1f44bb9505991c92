"""Proof on the user's own model that accumulation, ranks, precision and resume leave the numbers alone."""
