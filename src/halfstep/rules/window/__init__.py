"""Accumulation over micro-batches."""
