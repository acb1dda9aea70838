"""The worker's side of a push."""
