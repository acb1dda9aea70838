"""Adapters for the trainers of other projects. Each package requires its project to be installed.

Owns the translation of those projects' settings and hooks. Does not own the client, the publisher or the aligned model
that do the work.
"""
