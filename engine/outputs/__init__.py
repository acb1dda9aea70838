"""What becomes of an accepted request while it is open, and when its samples end."""
