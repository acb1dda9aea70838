"""The generation engine: requests in, samples out, one step at a time.

Owns: everything between an accepted request and its output. Does not own: sockets, users, or where new weights come
from. `engine.engine` joins its parts.
"""
