"""Everything private of vLLM that patchclamp relies on; nothing outside this room names any of it.

seams           everything of vLLM that is entered, read or set here, and the versions it was found in
configuration   what vLLM's configuration says, and which configurations are refused
backend         vLLM's Transformers backend, and the classes it decorates
runner          the model runners, the worker and the prefix cache
graphs          the idle and the active variant of compiled code and CUDA graphs
attention       the tap on attention's result
lora            adapters
seeds           seeded requests on the CPU
addresses       what CUDA graphs read, checked at every replay where that is asked for
"""
