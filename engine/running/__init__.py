"""A loaded model and its weights, and what computes a step with them."""
