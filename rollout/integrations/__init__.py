"""Adapters for other projects' trainers, one package for each; each needs its project installed."""
