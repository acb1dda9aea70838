"""Clients of a worker, and how to start one on this machine.

Owns: calls, their replies and the connection that carries them, with what becomes of both when it breaks. Does not own:
what messages look like (`protocol`), several workers at once (`fleet`), pushes of weights (`publisher`). Imports
neither torch nor transformers.
"""
