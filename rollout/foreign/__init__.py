"""An audit of any engine with an HTTP server: vLLM, SGLang, and trueroll's own front end."""
