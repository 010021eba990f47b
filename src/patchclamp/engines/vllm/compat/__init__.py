"""Everything private of vLLM that patchclamp relies on; nothing outside this room names any of it.

seams           the places where stock vLLM is entered, and the versions each was found at
configuration   what vLLM's configuration says, and what it may not be combined with
backend         vLLM's Transformers backend, and the classes it decorates
runner          the model runners, the worker and the prefix cache
graphs          compiled code and CUDA graphs, idle and active
addresses       what CUDA graphs read, checked at every replay where that is asked for
"""
