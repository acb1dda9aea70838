"""Adapters for the trainers of other projects. Each subpackage requires that its project is installed.

Owns: the translation of the projects' settings and hooks. Does not own: the client, the publisher or the aligned model.
"""
