"""Clients of a worker, and how to start one: no torch, no transformers."""
