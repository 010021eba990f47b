"""The private parts of vLLM that patchclamp relies on; only this package uses them.

seams           every part of vLLM that is wrapped, read or set here, with the versions it was checked on
configuration   facts from vLLM's configuration, and the configurations that are refused
backend         vLLM's Transformers backend, and the classes it decorates
blueprint       a trace of vLLM's own class of a model
core            admission in the engine core, and verdicts in the output processor
front           requests and engine cores of an `AsyncLLM`
runner          the model runners, the worker, the prefix cache, and the tap on attention's output
graphs          the idle and the active variant of compiled code and CUDA graphs
images          prompts with images
lora            adapters
"""
