"""SERVE: stock vLLM's OpenAI server with programs in its requests, additional routes, and a web page."""
