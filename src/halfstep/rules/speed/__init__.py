"""What costs time."""
