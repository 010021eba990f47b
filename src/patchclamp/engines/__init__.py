"""CARRY: the engines that run programs. One protocol (`base`), implemented on vLLM, Transformers, HTTP and a fake."""

from patchclamp.engines.base import Answer, Engine, Model, Request, Tokenizer

__all__ = ["Answer", "Engine", "Model", "Request", "Tokenizer"]
