"""The worker's socket: who may connect, and what is on its way to whom; keys for both ends."""
