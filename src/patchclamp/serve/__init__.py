"""SERVE: stock vLLM's OpenAI server with programs in its requests, routes of our own beside its routes, and a page."""
