"""The tracing front: interventions written as if the model were at hand.

`lm.trace(prompt)` gives proxies of the model's tensors. What is done with them is written down as ops of the language,
in order (`views`, `drafts`, `recording`); at the end of the `with` the programs are put in order (`schedule`) and run
by `lm.run` (`execute`), and what was saved is filled in (`saved`). The source of the caller is never read or rewritten.
"""
