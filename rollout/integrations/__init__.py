"""Adapters for the trainers of other projects. A subpackage works only if the trainer for which it is an adapter is
installed.

Owns: the translation of the trainers' settings and hooks into trueroll's settings and calls. Does not own: the client,
the publisher or the aligned model.
"""
