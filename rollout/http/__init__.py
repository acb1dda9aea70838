"""The HTTP front end: OpenAI's endpoints, the vLLM endpoints that trainers use, and the worker's lifecycle.

Owns: HTTP connections and their limits, authentication by API key, and the requests and responses of all endpoints.
Does not own: generation. To the worker or the fleet, the front end is an ordinary client.
"""
