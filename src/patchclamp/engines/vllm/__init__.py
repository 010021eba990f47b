"""Stock vLLM: `plugin` is what vLLM loads, `worker` runs beside its model runner, `cache` keeps its prefix cache right,
`frontend` drives one `LLMEngine`; `compat` alone knows vLLM's private names."""
