"""The place of weight updates from a trainer. They are not built yet: a worker serves the weights it started with."""
