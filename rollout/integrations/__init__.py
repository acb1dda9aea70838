"""Adapters for other projects' trainers, one package for each; each needs its project installed.

Owns: the words and the hooks of those projects. Does not own: anything that they ask for, which is client, publisher
and aligned model.
"""
