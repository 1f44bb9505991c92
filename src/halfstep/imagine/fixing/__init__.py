"""What rules ask to be changed, as edits of the text."""
