"""Engines as the checks start them: ours in this process, stock vLLM in one of its own, both compiled anew."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.gpu.board import note
from tests.models import UNTIMED

PROMPTS = [[(7 * i * i + 13 * i + n) % 30000 + 100 for i in range(n)] for n in (5, 33, 90, 17)]
TOKENS = 12
COMPILED = Path(tempfile.gettempdir()) / "patchclamp-check-compiled"
BASE = {
    "skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 2048,
    "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30,  # others may start at the same time
    "enable_prefix_caching": False,  # a cached prefix was computed in another batch: equal, but not to the last bit
    "compilation_config": {"inductor_compile_config": UNTIMED},
}  # fmt: skip


class Stock:
    """Stock vLLM without the plugin, which begins to answer `PROMPTS` in a process of its own, each with the adapter in
    a folder, if any, `later` prompts one after the other."""

    def __init__(self, model: str, options: dict, adapters: list | None = None, later: list | None = None,
                 **environ: str) -> None:  # fmt: skip
        code = (
            "import json, sys\nfrom vllm import LLM, SamplingParams\nfrom vllm.lora.request import LoRARequest\n"
            "a = json.loads(sys.argv[1])\n"
            "llm = LLM(a['model'], **a['options'])\n"
            "s = SamplingParams(temperature=0, max_tokens=a['n'], logprobs=0, ignore_eos=True, detokenize=False)\n"
            "n = {f: LoRARequest(f, i + 1, f) for i, f in enumerate(sorted({f for f in a['adapters'] or [] if f}))}\n"
            "l = a['adapters'] and [n.get(f) for f in a['adapters']]\n"
            "o = llm.generate([{'prompt_token_ids': p} for p in a['prompts']], s, use_tqdm=False, lora_request=l)\n"
            "for p in a['later']:\n    o += llm.generate([{'prompt_token_ids': p}], s, use_tqdm=False)\n"
            "assert 'patchclamp' not in sys.modules\n"
            "print('RESULT ' + json.dumps([[list(x.token_ids), [t[i].logprob.hex() for t, i in "
            "zip(x.logprobs, x.token_ids)]] for x in (y.outputs[0] for y in o)]))"
        )
        asked = json.dumps({"model": model, "options": options, "prompts": PROMPTS, "n": TOKENS,
                            "adapters": adapters, "later": later or []})  # fmt: skip
        environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environ}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen([sys.executable, "-c", code, asked], env=environment, text=True,
                                         stdout=subprocess.PIPE, stderr=self._errors)  # fmt: skip

    def __enter__(self) -> Stock:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def answer(self) -> list:
        """Token ids and logprobs, in hex, of each prompt, `later` ones last. Raises `RuntimeError` with the end of what it complained of."""
        out, _ = self._process.communicate()
        lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
        if not lines:
            self._errors.seek(0)
            raise RuntimeError(f"stock vLLM: {self._errors.read()[-3000:]}")
        return json.loads(lines[-1][7:])


def setting(mode: str) -> tuple[dict, dict[str, str]]:
    """Engine options and environment of a mode such as "v1 graphs" or "tp2 eager"."""
    options: dict = {**copy.deepcopy(BASE), "dtype": "bfloat16", "enforce_eager": mode.endswith("eager")}
    if "tp2" in mode:
        options["tensor_parallel_size"] = 2
    if "pp2" in mode:
        options["pipeline_parallel_size"] = 2
    return options, {"VLLM_USE_V2_MODEL_RUNNER": "0"} if "v1" in mode else {}


@contextlib.contextmanager
def surroundings(environ: dict[str, str]):
    """Engines started within see these variables too: vLLM remembers its own from the first engine on."""
    from vllm import envs

    from patchclamp.engines.vllm.compat.configuration import environment

    with environment(environ):
        yield
    envs.disable_envs_cache()


def fresh(who: str, mode: str) -> dict[str, str]:
    """An environment in which a model is compiled anew. Triton's own cache goes by content and is everybody's, and so is
    what vLLM has found of its classes, which takes half a minute on a fresh machine."""
    place = Path(f"{COMPILED}/{who}_{mode}".replace(" ", "_"))
    (place / "vllm").mkdir(parents=True, exist_ok=True)
    (COMPILED / "modelinfos").mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (place / "vllm" / "modelinfos").symlink_to(COMPILED / "modelinfos")
    return {"VLLM_CACHE_ROOT": f"{place}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{place}/inductor",
            "TRITON_CACHE_DIR": f"{COMPILED}/triton"}  # fmt: skip


def started(part: str, lm: Any, runner: str = "v2") -> None:
    """Notes whether an engine has the runner and the graphs that are to be checked."""
    status = lm.engine.status()
    graphs = status.get("active_graphs", 0)
    told = f"runner {status['runner']}, {graphs} active sizes {status.get('active_graphs_problem', '')}"
    note(part, "starts", status["runner"] == runner and graphs > 0, told)


def attached(lm) -> object:
    """What is attached to the worker of an engine in this process."""
    return lm.engine._engine.engine_core.engine_core.model_executor.driver_worker.worker.patchclamp


def attached_runner(lm) -> object:
    """The model runner of an engine in this process."""
    return lm.engine._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def bits(run) -> tuple:
    return run.token_ids, [x.hex() for x in run.logprobs]


def apart(a, b) -> float:
    """The largest difference, against the largest number; not a number where either has one."""
    return ((a - b).abs().max() / b.abs().max()).item()
