"""An `LLM` with patchclamp and a NIXL connector, in a process of its own: vLLM has one connector per process."""

from __future__ import annotations

import multiprocessing
import os
import socket
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np

import patchclamp as pc

Ask = tuple[list[int], int, pc.Program | None, dict[str, Any] | None]  # token ids, new tokens, program, transfer
Told = dict[str, Any]


def _serve(connection: Connection, folder: str, port: int, role: str) -> None:
    os.environ |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
                   "UCX_TLS": "tcp,self,sm"}  # fmt: skip
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from patchclamp.engines.vllm.compat.configuration import surroundings

    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role=role, kv_buffer_device="cpu")  # pyright: ignore
    with surroundings(False):
        llm = LLM(
            folder, dtype="float32", enforce_eager=True, max_model_len=256, block_size=32, skip_tokenizer_init=True,
            kv_cache_memory_bytes=1 << 24, additional_config={"patchclamp": {}}, kv_transfer_config=transfer,
        )  # fmt: skip
    runner: Any = llm.llm_engine.model_executor.driver_worker.model_runner  # pyright: ignore
    execute, computed = runner.execute_model, 0

    def count(step: Any, *args: Any, **named: Any) -> Any:
        nonlocal computed
        computed += step.total_num_scheduled_tokens
        return execute(step, *args, **named)

    runner.execute_model = count

    def params(tokens: int, program: pc.Program | None, transfer: dict[str, Any] | None) -> SamplingParams:
        extra = {"patchclamp": program, "kv_transfer_params": transfer}
        extra = {name: value for name, value in extra.items() if value is not None}
        return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, logprobs=0, extra_args=extra or None)

    connection.send("ready")
    while (asked := connection.recv()) is not None:
        before = computed
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, *_ in asked],
                               [params(*rest) for _, *rest in asked], use_tqdm=False)  # fmt: skip
        told: list[Told] = []
        for output in outputs:
            [completion] = output.outputs
            run: Any = getattr(completion, "patchclamp", None)
            if run is not None and run.error is not None:
                told.append({"error": run.error})
                continue
            scored = zip(completion.logprobs or (), completion.token_ids, strict=True)
            told.append({
                "tokens": list(completion.token_ids), "logprobs": [each[token].logprob for each, token in scored],
                "transfer": output.kv_transfer_params, "cached": output.num_cached_tokens,
                "rows": None if run is None else np.asarray(run[pc.resid_post[1]]),
            })  # fmt: skip
        connection.send((told, computed - before))


class NixlEngine:
    """`ask` sends requests that run together; returns what each gave, and the number of tokens computed."""

    def __init__(self, folder: str, role: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        here, there = multiprocessing.get_context("spawn").Pipe()
        self._connection: Connection = here
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there, folder, port, role))
        self._process.start()
        there.close()

    def ready(self) -> None:
        assert self._connection.recv() == "ready"

    def ask(self, *asked: Ask) -> tuple[list[Told], int]:
        self._connection.send(asked)
        assert self._connection.poll(120), "no answer in two minutes"
        return self._connection.recv()

    def one(self, ids: list[int], tokens: int, program: pc.Program | None = None, transfer: Any = None) -> Told:
        return self.ask((ids, tokens, program, transfer))[0][0]

    def __enter__(self) -> NixlEngine:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.send(None)
        self._process.join(30)
        self._process.kill()
