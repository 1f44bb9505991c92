"""One language for training loops: what the engine does, the recorder hears and the imagined run tells."""
