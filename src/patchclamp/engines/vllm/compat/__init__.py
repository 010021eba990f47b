"""The private parts of vLLM that patchclamp relies on; only this package uses them.

seams           the functions of vLLM that are wrapped here, checked at startup
configuration   facts from vLLM's configuration, and unsupported configurations
architecture    a model's site table; a trace of vLLM's own class
clients         `LLMEngine` and `AsyncLLM`: requests, outputs, calls to engine cores
core            admission and the prefix cache in the engine core, and verdicts
runner          the model runners, the worker, and the tap on attention's output
variants        the idle and the active variant of compiled code and CUDA graphs
images          prompts with images
lora            adapters
"""
