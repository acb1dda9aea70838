"""Adapters for the trainers of other projects. Each package here requires that its project is installed.

Owns the translation of these projects' settings and hooks. Does not own the client, the publisher or the aligned model,
which do the work.
"""
