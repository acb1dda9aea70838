"""The trainer's side of a push."""
