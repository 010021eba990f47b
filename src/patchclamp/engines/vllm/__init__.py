"""Stock vLLM: vLLM loads `setup`, `worker` runs alongside its model runner, `sync_engine` drives one `LLMEngine`, and
`async_engine` runs in a server. Only `compat` uses vLLM's private names."""
