"""The HTTP front end: OpenAI's endpoints, those of trainers that know vLLM, and the worker's lifecycle."""
