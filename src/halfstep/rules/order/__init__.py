"""What must come before what."""
