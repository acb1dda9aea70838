"""KV memory: its blocks and the prefixes they hold, and the arenas that memory is carved from."""
