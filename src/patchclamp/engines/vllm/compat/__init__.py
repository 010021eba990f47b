"""The private parts of vLLM that patchclamp relies on; only this package uses them.

seams           the functions of vLLM that are wrapped here, compared at start
configuration   facts from vLLM's configuration, and unsupported configurations
architecture    the site table of a model; a trace of vLLM's own class
clients         an `LLMEngine` and an `AsyncLLM`: requests, outputs, calls of engine cores
core            admission and the prefix cache in the engine core, and verdicts
runner          the model runners, the worker, and the tap on attention's output
variants        the idle and the active variant of compiled code and CUDA graphs
images          prompts with images
lora            adapters
"""
