"""The guide's table for your own model and machine: measured, each row in processes of its own, with spread."""
