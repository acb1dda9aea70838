"""Clients of a worker, and a launcher of workers on this machine.

Owns: calls, their replies, and the connection that carries them, with the handling of lost connections. Does not own:
the form of messages (`protocol`), several workers at once (`fleet`), or pushes of weights (`publisher`). Imports
neither torch nor transformers.
"""
