"""What a plan costs in memory and time, before it is run: arithmetic over facts, without torch."""
