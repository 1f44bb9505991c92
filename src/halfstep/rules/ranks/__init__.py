"""What ranks must do alike."""
