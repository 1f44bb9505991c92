"""The imagined run: reads a program's source and tells what its training loop would do, without running it."""
