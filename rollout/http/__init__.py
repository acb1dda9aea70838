"""The HTTP front end: OpenAI's endpoints, those of trainers that know vLLM, and the worker's lifecycle.

Owns: connections over HTTP and their limits, who may come in by a key, and what endpoints take and answer. Does not
own: generation, for which it asks a worker or a fleet as any client does.
"""
