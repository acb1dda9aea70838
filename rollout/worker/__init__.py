"""The worker: requests and control calls in front of one engine."""
