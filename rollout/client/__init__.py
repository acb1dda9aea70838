"""Clients of a worker, and a launcher of workers on this machine.

Owns: calls, their replies, and the connection to the worker, including reconnection. Does not own: the format of
messages (`protocol`), calls to several workers (`fleet`), or pushes of weights (`publisher`). Imports neither torch nor
transformers.
"""
