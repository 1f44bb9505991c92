"""Hears an unmodified training script while it runs, and says what is wrong with it (`halfstep watch`)."""
