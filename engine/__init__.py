"""The generation engine: requests in, samples out, one step at a time.

Owns everything between an accepted request and its output. Does not own sockets, users, or the origin of new weights.
`engine.engine` joins its parts.
"""
