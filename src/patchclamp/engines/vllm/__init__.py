"""Stock vLLM: vLLM loads `plugin`, `worker` runs beside its model runner, `cache` keeps its prefix cache correct,
`frontend` drives one `LLMEngine`; only `compat` uses vLLM's private names."""
