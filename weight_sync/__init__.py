"""Weight pushes from a trainer to its workers: the payload, the transports, and the code at both ends.

Owns: a push, from the first byte to the commit or abort. Does not own: the socket that carries push calls, or the
engine, which does not know about pushes.
"""
