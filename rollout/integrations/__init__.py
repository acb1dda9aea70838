"""Adapters for the trainers of other projects. Each subpackage requires that its project is installed.

Owns: the translation of these projects' settings and hooks into trueroll's settings and calls. Does not own: the
client, the publisher or the aligned model.
"""
