"""Adapters for the trainers of other projects. Each subpackage is an adapter for one trainer, and works only if this
trainer is installed.

Owns: the translation of the trainers' settings and hooks into trueroll's settings and calls. Does not own: the client,
the publisher or the aligned model.
"""
