"""What the imagined run knows of Python's builtins, of torch and of the frameworks around it."""
