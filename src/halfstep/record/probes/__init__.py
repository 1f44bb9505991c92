"""Measure a training loop from the inside, and say what is wrong with its numbers or its speed."""
