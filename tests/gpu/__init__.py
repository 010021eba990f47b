"""On a CUDA device with vLLM: `python -m tests.gpu.check --out DIR` checks the guarantees and writes what it found."""
