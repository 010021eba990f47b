"""How fast a harvest is: tokens a second from documents to sealed files, beside stock vLLM's prefill and the disk.

    python benchmarks/harvest.py --shape 8b --out DIR          (a CUDA machine; 0.6b likewise; random weights)
    python benchmarks/harvest.py --shape tiny                  (a CPU is enough, to see that it works)

Stock vLLM and ours are processes of their own and take turns in every round, on documents of random tokens: stock
computes their prefill; ours harvests one site, and four, in bf16, with all that belongs to it: the plan, the shuffle,
statistics, and the files on the disk. The disk's own speed is that of one file of as many bytes as four sites have,
written from end to end in the same folder and brought to the disk. The bar is 70 % of stock's prefill or 90 % of the
disk, whichever is less.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SIZES = {"tiny": (64, 128), "0.6b": (512, 1024), "8b": (256, 1024)}  # documents of a round, and tokens of each
PREFILL, DISK = 0.7, 0.9
CHUNK = np.zeros(1 << 24, np.uint8)


class Stock:
    """Stock vLLM's prefill."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(model=model, disable_log_stats=True, **options)

    def seconds(self, documents: list[list[int]], asked: dict[str, Any]) -> dict[str, float]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        began = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": ids} for ids in documents], params, use_tqdm=False)
        return {"seconds": time.perf_counter() - began}

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class Ours:
    """`harvest`, and two ways without writing: the same captures, fetched and dropped, and a stream whose batches are
    dropped."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import patchclamp as pc

        self.lm = pc.LM(model, engine="vllm", prove=False, **options)

    def sites(self, count: int) -> list[Any]:
        import patchclamp as pc

        layers = self.lm.model.layers
        return [pc.resid_post[layers * (i + 1) // (count + 1)] for i in range(count)]

    def seconds(self, documents: list[list[int]], asked: dict[str, Any]) -> dict[str, float]:
        import patchclamp as pc

        if asked.get("fetched"):
            return {"seconds": self._fetched(documents, self.sites(asked["sites"]))}
        if asked.get("streamed"):
            return {"seconds": self._streamed(documents, self.sites(asked["sites"]), asked["parts"])}
        place = Path(tempfile.mkdtemp(prefix="harvest-", dir=asked["folder"]))
        began = time.perf_counter()
        made = pc.studies.harvest(self.lm, documents, place, sites=self.sites(asked["sites"]), parts=asked["parts"],
                                  checkpoint_bytes=asked["checkpoint_bytes"], show_progress=False)  # fmt: skip
        seconds = time.perf_counter() - began
        assert made.complete
        assert made.rows == made.ran == sum(map(len, documents))
        size = sum(path.stat().st_size for path in place.rglob("*.safetensors"))
        shutil.rmtree(place)
        return {"seconds": seconds, "bytes": size}

    def close(self) -> None:
        self.lm.close()

    def _streamed(self, documents: list[list[int]], sites: list[Any], parts: int | None) -> float:
        import patchclamp as pc

        began = time.perf_counter()
        stream = pc.studies.Harvest(documents=documents, sites=sites, parts=parts).stream(self.lm)
        rows = sum(len(batch if len(sites) == 1 else batch[str(sites[0])]) for batch in stream)
        assert rows == sum(map(len, documents))
        return time.perf_counter() - began

    def _fetched(self, documents: list[list[int]], sites: list[Any]) -> float:
        import patchclamp as pc
        from patchclamp.studies.study import run_batches

        captures = [pc.Capture(site, dtype="bfloat16") for site in sites]
        calls = [{"prompt": documents[i : i + 32], "max_tokens": 1, "capture": captures}
                 for i in range(0, len(documents), 32)]  # fmt: skip

        def read(runs: list[Any]) -> None:
            self.lm.fetch(runs, sites)
            for run in runs:
                run.close()

        began = time.perf_counter()
        run_batches(self.lm, calls, read)
        return time.perf_counter() - began


class Remote:
    """A side in a process of its own."""

    def __init__(self, kind: type, model: str, options: dict[str, Any], environ: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, model, options, environ))
        self._process.start()
        theirs.close()

    def answer(self) -> Any:
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def seconds(self, documents: list[list[int]], **asked: Any) -> dict[str, float]:
        self._pipe.send((documents, asked))
        return self.answer()

    def close(self) -> None:
        self._pipe.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.terminate()


def _serve(pipe: Any, kind: type, model: str, options: dict[str, Any], environ: dict[str, str]) -> None:
    os.environ.update(environ)
    side = None
    try:
        side = kind(model, options)
        pipe.send({})
        while True:
            pipe.send(side.seconds(*pipe.recv()))
    except EOFError:  # nobody asks any more
        if side is not None:
            side.close()
        os._exit(0)
    except BaseException as error:
        pipe.send(f"{kind.__name__}: {type(error).__name__}: {error}")
        raise


def disk_seconds(folder: Path, size: int) -> float:
    """Seconds to write a file of that size from end to end and to bring it to the disk."""
    path = folder / "sequential"
    began = time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(-(-size // len(CHUNK))):
            file.write(CHUNK)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def compare_streams(args: argparse.Namespace, ours: Remote) -> None:
    """Streams beside rows in the caller's hand, in turn."""
    count, length = SIZES[args.shape]
    count = args.documents or count
    for sites in (1, 4):
        ratios = []
        for number in range(args.rounds + 1):
            taken = {}
            for way in ("fetched", "streamed"):
                draw = np.random.default_rng((sites, number, way == "streamed"))
                documents = draw.integers(100, 500, (count, length)).tolist()
                taken[way] = ours.seconds(documents, sites=sites, parts=args.parts, **{way: True})["seconds"]
            ratios += [taken["fetched"] / taken["streamed"]] if number else []
            print(sites, number, taken, flush=True)
        print(f"stream of {count * length} tokens, {sites} sites: {np.median(ratios):.3f} of rows in hand", flush=True)


def measure(args: argparse.Namespace, sides: dict[str, Remote]) -> dict[str, Any]:
    """Every round: stock, ours with one site and with four, and the disk, in turn."""
    count, length = SIZES[args.shape]
    count = args.documents or count
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    ways = ("fetched", "streamed")
    names = ["stock", "disk", *(name for sites in "14" for name in (sites, *(f"{sites} {way}" for way in ways)))]
    figures: dict[str, list[float]] = {name: [] for name in names}
    size_of: dict[str, float] = {}
    for number in range(args.rounds + 1):
        draw = np.random.default_rng(number)
        taken: dict[str, float] = {}

        def documents() -> list[list[int]]:  # new ones each time: the prefix cache has nothing of them
            return draw.integers(100, 500, (count, length)).tolist()  # noqa: B023

        for name in ["stock", "1", "4"] if number % 2 else ["4", "1", "stock"]:
            if name == "stock":
                taken["stock"] = sides["stock"].seconds(documents())["seconds"]
                continue
            answer = sides["ours"].seconds(documents(), sites=int(name), folder=str(folder), parts=args.parts,
                                           checkpoint_bytes=args.checkpoint_mib << 20)  # fmt: skip
            taken[name], size_of[name] = answer["seconds"], answer["bytes"]
            for way in ways:
                answer = sides["ours"].seconds(documents(), sites=int(name), parts=args.parts, **{way: True})
                taken[f"{name} {way}"] = answer["seconds"]
        taken["disk"] = disk_seconds(folder, int(size_of["4"])) / size_of["4"]
        for name, seconds in taken.items() if number else ():  # the first round is not counted
            figures[name].append(seconds)
        print(number, {name: round(seconds, 10) for name, seconds in taken.items()}, flush=True)
    tokens = count * length
    speeds = {name: round(tokens / float(np.median(times))) for name, times in figures.items() if name != "disk"}
    disk = 1 / float(np.median(figures["disk"]))
    per_token = {name: size / tokens for name, size in size_of.items()}
    return {
        "tokens": tokens, "rounds": args.rounds, "tokens_per_s": speeds, "disk_bytes_per_s": round(disk),
        "bytes_per_token": per_token, "seconds": figures,
        "bars": {name: min(PREFILL * speeds["stock"], DISK * disk / per_token[name]) for name in ("1", "4")},
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    speeds, bars = result["tokens_per_s"], result["bars"]
    lines = [
        f"# Harvest, {result['date']}", "",
        f"{result['machine']}, vLLM {result['vllm']}, shape {result['shape']}, {result['tokens']} tokens a round, "
        f"medians of {result['rounds']} rounds. `{result['command']}`", "",
        f"Stock prefill {speeds['stock']} tokens/s; the disk writes {result['disk_bytes_per_s'] / 1e9:.2f} GB/s.", "",
        "| sites | harvest tokens/s | of stock's prefill | GB/s | of the disk | bar tokens/s | fetched | streamed |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in ("1", "4"):
        rate = speeds[name] * result["bytes_per_token"][name]
        lines.append(
            f"| {name} | {speeds[name]} | {speeds[name] / speeds['stock']:.2f} | {rate / 1e9:.2f} | "
            f"{rate / result['disk_bytes_per_s']:.2f} | {bars[name]:.0f} | {speeds[f'{name} fetched']} | "
            f"{speeds[f'{name} streamed']} |"
        )
    return "\n".join(lines) + "\n"


def start(args: argparse.Namespace) -> dict[str, Remote]:
    """Stock, unless only streams are measured, and ours, which start together."""
    from tests.models import UNTIMED, shape_only

    tiny = args.shape == "tiny"
    changed = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=32,
                   vocab_size=512) if tiny else {}  # fmt: skip
    model = shape_only(Path(f"/tmp/harvest-{args.shape}"), "8b" if tiny else args.shape, 5 if tiny else None, **changed)
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 2304}
    if tiny:
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 27, "max_num_seqs": 64, "block_size": 32,
                    "max_model_len": 512}  # fmt: skip
    else:
        compilation = {"inductor_compile_config": UNTIMED, "cudagraph_capture_sizes": [1, 8, 64]}
        options |= {"kv_cache_memory_bytes": 12 << 30, "gpu_memory_utilization": 0.45, "max_num_seqs": 256,
                    "compilation_config": compilation}  # fmt: skip
    ours = {"multiprocess_mode": args.our_core == "beside", "numerics": args.numerics}
    environ = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if tiny else {}  # else as `LLM` starts it: beside the caller
    sides = {} if args.streams else {"stock": Remote(Stock, model, options, environ)}
    sides["ours"] = Remote(Ours, model, {**options, **ours}, {})
    for side in sides.values():
        side.answer()
    return sides


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SIZES, default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, help="of a round")
    parser.add_argument("--parts", type=int, help="as many as a harvest makes by itself, unless given")
    parser.add_argument("--checkpoint-mib", type=int, default=4096)
    parser.add_argument("--our-core", choices=["in process", "beside"], default="in process")
    parser.add_argument("--numerics", choices=["stock", "uniform"], default="uniform")
    parser.add_argument("--folder", default="/tmp/harvests", help="on the disk that is measured")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--streams", action="store_true", help="only streams, beside rows in hand")
    args = parser.parse_args()
    import torch
    import vllm

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    sides = start(args)
    try:
        if args.streams:
            compare_streams(args, sides["ours"])
            return
        measured = measure(args, sides)
    finally:
        for side in sides.values():
            side.close()
    result = {
        "date": datetime.date.today().isoformat(), "vllm": vllm.__version__, "shape": args.shape, "machine": machine,
        "command": " ".join(["python benchmarks/harvest.py", *(f'"{a}"' if " " in a else a for a in sys.argv[1:])]),
        **measured,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"harvest-{args.shape}-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1))
    path.with_suffix(".md").write_text(table(result))
    print(table(result))


if __name__ == "__main__":
    main()
