"""The tracing interface: interventions written as reads and writes of the model's tensors.

`lm.trace(prompt)` returns proxies of those tensors (`proxies`), which record each operation as an op of the language
(`recording`). At the end of the `with` block the programs are scheduled, run by `lm.run`, and the saved tensors filled
in (`execute`). The caller's source is never parsed or rewritten.
"""
