"""The decoder, and how its weights are found and loaded."""
