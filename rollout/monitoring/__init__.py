"""What a worker measures of itself, and how it is read."""
