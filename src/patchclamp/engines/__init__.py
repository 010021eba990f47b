"""CARRY: what runs a program. One protocol (`base`), and vLLM, Transformers and the shipped fake behind it."""

from patchclamp.engines.base import Answer, Engine, Model, Request, Tokenizer

__all__ = ["Answer", "Engine", "Model", "Request", "Tokenizer"]
