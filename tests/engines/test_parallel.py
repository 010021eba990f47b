"""Guarantee 3 over several workers: tensor and pipeline parallel edit the same rows and keep each captured row once."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from vllm.envs import disable_envs_cache

import patchclamp as pc
from patchclamp.proving import prove
from tests.models import with_weights

pytestmark = pytest.mark.slow

D, LAYERS, RECORDS = 128, 4, 64
SHAPE = {"hidden_size": D, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32, "vocab_size": 512}  # fmt: skip
SHORT, LONG = [3, 5, 7, 11, 13, 17, 19], list(range(100, 180))
LAYERED = (
    "resid_pre",
    "resid_mid",
    "resid_post",
    "attn_in",
    "attn_out",
    "mlp_in",
    "mlp_out",
    "q",
    "k",
    "v",
    "z",
    "neurons",
)
SINGLE = ("embed", "final_norm", "logits")
VECTOR = torch.randn(D, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """`start(tensor_parallel_size=2)` is an `LM` of a small random model; every core takes its turn as a worker's."""
    folder = with_weights(tmp_path_factory.mktemp("parallel"), "0.6b", LAYERS, **SHAPE)
    cores = sorted(os.sched_getaffinity(0))
    bound, made = os.environ.get("VLLM_CPU_OMP_THREADS_BIND"), []
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    disable_envs_cache()  # an engine that was started before this one has vLLM remember its environment

    def begin(**options) -> pc.LM:
        made.append(pc.LM(folder, engine="vllm", dtype="float32", max_model_len=4096, max_num_seqs=8, prove=False,
                          max_num_batched_tokens=32, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 25,
                          max_records=RECORDS, check_rate=1, **options))  # fmt: skip
        return made[-1]

    yield begin
    for lm in made:
        lm.close()
    os.environ.pop("VLLM_CPU_OMP_THREADS_BIND")
    if bound is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bound
    disable_envs_cache()


def seen(lm: pc.LM) -> tuple[dict[str, torch.Tensor], int]:
    """Everything an engine captures of two prompts, one of several chunks, what edits at every layer do, and the bytes
    that the captures took."""
    found = {}
    runs = lm.run([SHORT, LONG], max_tokens=4, capture=[*LAYERED, *SINGLE], logprobs=True)
    for i, run in enumerate(runs):
        found |= {f"{i} {name}[{n}]": run[f"{name}[{n}]"] for name in LAYERED for n in range(LAYERS)}
        found |= {f"{i} {name}": run[name] for name in SINGLE} | {f"{i} plain": torch.tensor(run.logprobs)}
    size = lm.engine.status()["captured_bytes"]
    lenses = lm.run([SHORT, LONG], max_tokens=4, capture=[pc.Lens(pc.resid_post, top=3), pc.Lens(pc.mlp_out[1], top=1)])
    found |= {f"{i} lens": torch.tensor(run.lens[pc.resid_post].logprobs) for i, run in enumerate(lenses)}
    found |= {f"{i} lens of mlp_out": torch.tensor(run.lens["mlp_out[1]"].logprobs) for i, run in enumerate(lenses)}
    grid = pc.studies.logit_lens(lm, LONG, readout="device")
    found |= {"lens study": torch.tensor(np.stack([grid.kl, grid.entropy]))}
    for layer in range(LAYERS):
        edited = lm.run(
            [SHORT, LONG], max_tokens=4, edits=[pc.Add(VECTOR, at=pc.resid_post[layer], scale=0.5)], logprobs=True
        )
        found |= {f"{i} steered {layer}": torch.tensor(run.logprobs) for i, run in enumerate(edited)}
    found["logits"] = torch.tensor(
        lm.run(SHORT, max_tokens=3, edits=[pc.Zero(pc.logits, pc.prompt[-1])], logprobs=True).logprobs
    )
    found |= by_token_id(lm) | on_parts(lm, runs[1])
    found |= {
        f"weights {name}": lm.weights(name) for name in ("W_E", "W_U", "W_Q", "W_K", "W_O", "W_in", "W_out", "ln1.w")
    }
    for a, b in ((0, LAYERS - 1), (LAYERS - 1, 0), (1, 2)):  # from one stage's rows into the other's, and back
        value = pc.From(runs[1], pc.resid_post[a], pc.prompt[3])
        patched = lm.run(
            SHORT, max_tokens=3, edits=[pc.Replace(value, at=pc.resid_pre[b], tokens=pc.prompt[2])], logprobs=True
        )
        found[f"patched {a} {b}"] = torch.tensor(patched.logprobs)
    sweep = pc.studies.patch_sweep(lm, clean=SHORT, corrupt=[*SHORT[:3], 23, *SHORT[4:]], sites=[pc.resid_pre],
                                   answer=9, foil=11, metric="logit_diff")  # fmt: skip
    found |= {"swept": torch.as_tensor(sweep.grid)} | graded(lm, runs[1])
    return found | of_the_same_run(lm) | projected(lm) | conditional(lm) | attended(lm), size


def attended(lm: pc.LM) -> dict[str, torch.Tensor]:
    """Patterns of all heads, of one worker's and of both workers', and what edits of them do, in chunks."""
    captures = [
        pc.pattern,
        pc.Capture(pc.pattern[1, 3], pc.prompt[-1]),
        pc.Capture(pc.attn_scores[2, 1:3], "prompt[:3]"),
    ]
    edits = [
        pc.Knockout(pc.prompt[2:40], pc.pattern[0], "prompt[50:] | generated"),
        pc.Knockout(pc.prompt[3], pc.pattern[1, 1:3], pc.prompt[60:]),
        pc.Scale(0.5, pc.pattern[2, 3], pc.prompt[-1], keys=pc.prompt[:20]),
        pc.Replace(np.full((2, 70), 1 / 70), pc.pattern[3, 2], pc.prompt[-2:]),
    ]
    found = {}
    for name, each in {"plain": [], "edited": edits}.items():
        run = lm.run(LONG, edits=each, capture=[*captures, pc.z], max_tokens=3, logprobs=True)
        found |= {f"{name} patterns": run[pc.pattern], f"{name} attended": torch.tensor(run.logprobs)}
        found |= {f"{name} head": run.read("capture[1]"), f"{name} z": run[pc.z]}
        found[f"{name} scores"] = run[pc.attn_scores[2, 1:3]].clamp(min=-1e3)
    assert not found["edited patterns"][0, 50:, :, 2:40].any()
    assert not torch.allclose(found["plain z"], found["edited z"])
    best = lm.run(LONG, capture=pc.Capture(pc.pattern[1], pc.prompt[-1], top=3), max_tokens=1).attention["pattern[1]"]
    return found | {"largest": torch.tensor(best.values), "largest keys": torch.tensor(best.keys).float()}


def graded(lm: pc.LM, source: pc.Run) -> dict[str, torch.Tensor]:
    """Programs of whole rows and of shards, a cell that fails, and rows of another run; over two stages as requests."""
    programs = [
        [pc.Scale(0.5, at=pc.resid_post[1], tokens=pc.every[2])], [pc.Zero(at=pc.z[2, 1])], [pc.Zero(at=pc.k[0])],
        [pc.Add(VECTOR, at=pc.resid_mid[3])], [pc.Noise(0.3, at=pc.mlp_out[2]), pc.Scale(2.0, at=pc.neurons[1])],
        [pc.Replace(pc.From(source, pc.z[1], pc.every[4]), at=pc.z[1], tokens=pc.every[3])],
        [pc.Add([3e38] * D, at=pc.resid_post[2], scale=1e30)], [],
    ]  # fmt: skip
    grades = lm.grade(SHORT, programs, score=[9, [11, 23]], kl=True, top=3)
    assert list(grades.errors) == [6]
    if lm.engine.config.parallel_config.pipeline_parallel_size > 1:
        assert (grades.route, "pipeline parallelism" in grades.route_reason) == ("requests", True)
    else:
        assert (grades.route, grades.route_reason) == ("bulk", "")
    kept = [i for i in range(len(programs)) if i != 6]
    found = {"graded": grades.logprobs[kept], "likeliest": grades.top_logprobs[kept], "kl + 1": grades.kl[kept] + 1}
    return {name: torch.as_tensor(numbers) for name, numbers in found.items()}


def conditional(lm: pc.LM) -> dict[str, torch.Tensor]:
    """Edits of whole rows and of shards where a probe fires; over two stages, which refuse that, at the same tokens."""
    probe = pc.Probe(torch.randn(2, D, generator=torch.Generator().manual_seed(4)), at=pc.resid_post[1], name="p")
    scores = lm.run(LONG, max_tokens=3, capture=probe).probes["p"]
    condition, found = probe > float(scores[:, 0].median()), {"scores": scores}
    for scope in ("token", "onwards"):
        edits = [pc.Add(VECTOR, at=pc.resid_post[2]), pc.Scale(0.5, at=pc.z[3]), pc.Zero(pc.neurons[3])]
        if lm.engine.config.parallel_config.pipeline_parallel_size > 1:
            with pytest.raises(pc.UnsupportedSite):
                lm.run(LONG, edits=pc.When(condition, edits, scope=scope))
            fired = np.flatnonzero(scores[:, 0].numpy() > float(scores[:, 0].median()))
            where = fired[fired < len(LONG)] if scope == "token" else np.arange(fired[0], len(LONG))
            edits = [msgspec.structs.replace(edit, tokens=pc.tokens([int(p) for p in where])) for edit in edits]
        else:
            edits = [pc.When(condition, edits, scope=scope)]
        run = lm.run(LONG, max_tokens=1, edits=edits, logprobs=True)
        found |= {f"conditional {scope}": torch.tensor(run.logprobs), f"acted {scope}": torch.tensor(len(run.acted))}
    return found


def projected(lm: pc.LM) -> dict[str, torch.Tensor]:
    """Products of rows that all workers of a stage have, and of heads that one worker has: with the same matrices at
    one place after the other, so that each worker comes to need them."""
    draw, found = torch.Generator().manual_seed(2), {}
    lm.bank["rows"], lm.bank["heads"] = (torch.randn(3, D, generator=draw) for _ in range(2))
    for name, matrix in {"resid_post[0]": "rows", "resid_post[3]": "rows", "z[1, 0]": "heads", "z[1, 3]": "heads",
                         "k[2, 1]": torch.randn(2, 32, generator=draw)}.items():  # fmt: skip
        run = lm.run(LONG, max_tokens=3, capture=[pc.Capture(name, dtype="bfloat16", project=matrix), "mlp_out[1]"])
        none = lm.run(LONG, max_tokens=1, capture=[pc.Capture(name, "generated & token(9)", project=matrix)])
        assert none[name].shape == (0, run[name].shape[1])
        found |= {f"products {name}": run[name], f"beside them {name}": run["mlp_out[1]"]}
    pooled = [pc.Capture(pc.z[2], pc.prompt, pool="max"), pc.Capture(pc.resid_post[3], pc.prompt[1:], pool="mean"),
              pc.Probe("rows", at=pc.mlp_out[1], tokens=pc.prompt, pool="mean", name="p")]  # fmt: skip
    for i, run in enumerate(lm.run([LONG, SHORT], max_tokens=2, capture=pooled)):
        found |= {f"{i} pooled": run[pc.z[2]], f"{i} mean": run[pc.resid_post[3]], f"{i} mean score": run.probes["p"]}
    return found


def of_the_same_run(lm: pc.LM) -> dict[str, torch.Tensor]:
    """What earlier layers of the same run are further on, whole rows and shards; over two stages it takes two runs."""
    with lm.trace(LONG) as t:
        t.layers[LAYERS - 1].output[-3:] += 0.5 * t.layers[0].output[-3:]
        t.layers[2].attn.z[-1] = t.layers[1].attn.z[-1]
        rows, heads = t.layers[LAYERS - 1].output.save(), t.layers[2].attn.z.save()
    return {"same run rows": rows, "same run heads": heads.reshape(len(LONG), -1)}


def on_parts(lm: pc.LM, source: pc.Run) -> dict[str, torch.Tensor]:
    """What every op does to rows that workers have shards of: whole rows, and a head or some neurons of them."""
    draw, found = torch.Generator().manual_seed(1), {}
    for name in ("q", "k", "v", "z", "neurons"):
        count, size = lm.sites.parts(name)
        site = pc.Site(name)
        vector, row, mask = (torch.randn(count * size, generator=draw) for _ in range(3))
        few, part = site[1, 1:3] if name == "neurons" else site[1, 1], torch.randn(2 if name == "neurons" else size)
        part = torch.arange(len(part)) / len(part) - 0.7
        asked = {
            "add": pc.Add(vector, site[2]), "a row each": pc.Add(torch.stack([vector, row]), site[2], pc.prompt[3, 5]),
            "replace": pc.Replace(row, site[0], alpha=0.5, mask=(mask > 0).float()), "scale": pc.Scale(0.3, site[1]),
            "noise": pc.Noise(0.5, site[1], seed=3), "source": pc.Replace(pc.From(source, site[1]), site[1], pc.prompt[4]),
            "add to a part": pc.Add(part, few), "scale a part": pc.Scale(-1.0, few), "clear a part": pc.Zero(few),
            "noise in a part": pc.Noise(0.5, few, seed=4, relative=True), "ablate in a part": pc.Ablate(part, few),
            "low rank in a part": pc.LowRank(part, [0.3], -part, few),
            "clamp in a part": pc.Clamp(part, few, low=1.0), "add normed to a part": pc.Add(part, few, norm="match"),
            "rotate a part": pc.Rotate(torch.stack([part, part.flip(0)]), 50, few),
            "source of a part": pc.Replace(pc.From(source, few), few, pc.prompt[4]),
        }  # fmt: skip
        edits = [[pc.Capture(op.at), op, pc.Capture(op.at)] for op in asked.values()]
        for what, run in zip(
            asked, lm.run([SHORT] * len(edits), max_tokens=3, edits=edits, logprobs=True), strict=True
        ):
            at = asked[what].at
            before, after = (run[f"edits[{i}]"].reshape(len(SHORT) + 2, -1) for i in (0, 2))
            assert not torch.equal(before, after), (name, what)
            assert before.shape[1] == len(part) or at.index is None
            found |= {f"{name} {what} rows": after, f"{name} {what}": torch.tensor(run.logprobs)}
    return found


def by_token_id(lm: pc.LM) -> dict[str, torch.Tensor]:
    """What edits and captures of some tokens do at every layer and at logits, of a prompt of several chunks; the rows
    that an edit acts on are those of its tokens, and no others."""
    found, size = {}, {"max_tokens": 12, "sampling": {"ignore_eos": True}}
    plain = lm.run(LONG, **size, logprobs=True)
    often = max(plain.token_ids[:-1], key=plain.token_ids[:-1].count)
    for name, tokens in {"some": pc.token(often, LONG[3], LONG[40]), "others": pc.every - pc.token(often, LONG[40]),
                         "generated": pc.generated & pc.token(often)}.items():  # fmt: skip
        for n in range(LAYERS):
            at = pc.resid_post[n]
            run = lm.run(LONG, edits=[pc.Capture(at), pc.Add(VECTOR, at, tokens, scale=0.01), pc.Capture(at)],
                         capture=[pc.mlp_out[n] @ tokens], **size, logprobs=True)  # fmt: skip
            acted = (run["edits[2]"] != run["edits[0]"]).any(dim=1).nonzero()[:, 0]
            assert acted.tolist() == run.positions("capture[0]") == run.select(tokens).tolist()
            assert 0 < len(acted) < len(LONG) + 11
            assert run.idle_edits == []
            found |= {f"{name} {n} tokens": torch.tensor(run.token_ids), f"{name} {n}": run["capture[0]"]}
            found[f"{name} {n} logprobs"] = torch.tensor(run.logprobs)
    run = lm.run(LONG, edits=[pc.Add(-4 * torch.eye(512)[often], pc.logits, pc.every - pc.token(often))],
                 capture=[pc.logits @ (pc.every - pc.token(often))], **size, logprobs=True)  # fmt: skip
    return found | {"logits of others": run[pc.logits], "their logprobs": torch.tensor(run.logprobs)}


def faults(lm: pc.LM) -> None:
    """What goes wrong on one worker alone is the error of its run, and of no other in the batch."""
    steer = [pc.Add(VECTOR, pc.resid_post[0], scale=0.5)]
    plain, steered = lm.run([SHORT, SHORT], max_tokens=3, edits=[[], steer], logprobs=True)

    def check(hot: list[pc.Op], error: str) -> None:
        bad, good, edited = lm.run([SHORT] * 3, max_tokens=3, edits=[hot, [], steer], logprobs=True)
        assert isinstance(bad.error, pc.RunError)
        assert error in str(bad.error)
        for run, same in ((good, plain), (edited, steered)):
            assert run.error is None
            assert run.logprobs == pytest.approx(same.logprobs, abs=1e-4)

    for layer in (0, LAYERS - 1):  # in the last step, of which the other stage knows nothing
        check([pc.Add([3e38] * D, pc.resid_post[layer], pc.generated[1], scale=1e30)], "not finite")
    point = next(point.number for point in lm.sites.points if (point.kind, point.layer) == ("stream", LAYERS - 1))

    def breaks(name: str) -> Callable[[Any], None]:
        def break_once(wrapper: Any) -> None:
            """The second worker does not do something once: install the program that comes first, or act at a point."""
            runtime = wrapper.worker.patchclamp.runtime
            if wrapper.worker.rank == 1:
                owner = runtime if name == "_localise" else runtime.step
                stock = getattr(owner, name)

                def broken(*args: Any) -> Any:
                    if name == "apply" and args[0] != point:
                        return stock(*args)
                    setattr(owner, name, stock)
                    raise ZeroDivisionError(f"{name} is broken")

                setattr(owner, name, broken)

        return break_once

    # not through the core, which would take it for new weights
    executor = lm.engine._engine.engine_core.engine_core.model_executor
    for name in ("_localise", "apply"):
        lm.engine._call(lambda name=name: executor.collective_rpc(breaks(name))).result()
        check([pc.Add(VECTOR, pc.resid_post[LAYERS - 2])], f"{name} is broken")
        check([pc.Add([3e38] * D, pc.resid_post[0], scale=1e30)], "not finite")


def a_batch_that_one_worker_cannot_open(lm: pc.LM) -> None:
    """Its error is that of all: the other worker does not wait for the one that failed."""

    def break_once(wrapper: Any) -> None:
        worker = wrapper.worker
        if worker.rank == 1:
            bulk, stock = worker.patchclamp._bulk, worker.patchclamp._bulk.open

            def broken(*args: Any) -> None:
                bulk.open = stock
                raise ZeroDivisionError("open is broken")

            bulk.open = broken

    executor = lm.engine._engine.engine_core.engine_core.model_executor
    lm.engine._call(lambda: executor.collective_rpc(break_once)).result()
    with pytest.raises(pc.PatchclampError, match="open is broken"):
        lm.grade(SHORT, [pc.Zero(pc.resid_post[0])], score=[9])
    assert lm.grade(SHORT, [pc.Zero(pc.resid_post[0])], score=[9]).route == "bulk"


def a_worker_that_dies_is_the_error_of_all(lm: pc.LM) -> None:
    """Nothing hangs, or the test takes too long; it is the last thing that happens to an engine."""
    processes = lm.engine._engine.engine_core.engine_core.model_executor.workers
    stream = lm.stream(LONG, max_tokens=1000, sampling={"ignore_eos": True})
    next(stream)
    os.kill(processes[1].proc.pid, signal.SIGKILL)
    with pytest.raises(pc.EngineError):
        list(stream)
    with pytest.raises(pc.EngineError):
        lm.run(SHORT, max_tokens=1, edits=[pc.Zero(pc.resid_post[0])])


@pytest.fixture(scope="module")
def alone(start):
    return seen(start(enforce_eager=True))


@pytest.mark.parametrize("options", [
    {"tensor_parallel_size": 2, "enforce_eager": True},
    {"pipeline_parallel_size": 2},  # compiled: run eagerly on a CPU, stock vLLM 0.32's second stage fails
])  # fmt: skip
def test_two_workers_do_what_one_does(start, alone, options):
    lm, (alone, bytes_alone) = start(**options), alone
    assert lm.engine.status()["workers"] == 2
    with pytest.raises(pc.EngineError, match="allow_code"):
        pc.LM("", lm.engine, prove=False, allow_code=True)
    with pytest.raises(pc.ProgramError, match=r"edits\[0\].fn: .*allow_code"):
        lm.run(SHORT, edits=[pc.Apply(lambda h: h, pc.resid_post[0])], logprobs=True)
    found, size = seen(lm)
    assert {proof.name: proof.note for proof in prove(lm, full=True) if not proof.holds} == {}
    assert found.keys() == alone.keys()
    apart = {
        name: float((rows - alone[name]).float().abs().max() / alone[name].abs().max().clamp(min=1e-6))
        for name, rows in found.items()
    }
    # a product kept in bfloat16 may lie between two steps of that type, and fall on either
    near = {name: 2**-8 if rows.dtype == torch.bfloat16 else 1e-4 for name, rows in found.items()}
    assert {name: far for name, far in apart.items() if not far <= near[name]} == {}
    assert abs(size - bytes_alone) < 0.01 * bytes_alone  # each row once
    changed = [float((alone[f"0 steered {n}"] - alone["0 plain"]).abs().max()) for n in range(LAYERS)]
    assert min(changed) > 1e-2  # the edits that agree are edits

    wide = lm.run(
        list(range(2, 402)) * 6, max_tokens=1, capture=[pc.resid_post[0], pc.resid_post[LAYERS - 1]], logprobs=True
    )
    for n in (0, LAYERS - 1):  # rows of over a MiB leave their worker by another way
        assert wide[pc.resid_post[n]].shape == (2400, D)
        assert wide.positions(pc.resid_post[n]) == list(range(2400))
    assert not torch.equal(wide[pc.resid_post[0]], wide[pc.resid_post[LAYERS - 1]])
    brought = lm.run(SHORT, max_tokens=1, edits=[pc.Replace(pc.From(wide, pc.resid_post[0], pc.prompt[2000]),
                     at=pc.resid_post[LAYERS - 1], tokens=pc.prompt[-1])], capture=[pc.resid_post[LAYERS - 1]], logprobs=True)  # fmt: skip
    assert torch.equal(brought[pc.resid_post[LAYERS - 1]][-1], wide[pc.resid_post[0]][2000])

    wide.close(), brought.close()
    kept = lm.run(SHORT, max_tokens=4, capture=[pc.resid_post], logprobs=True)
    back = lm.run(
        SHORT,
        max_tokens=4,
        edits=[pc.Replace(pc.From(kept), at=pc.resid_post[n]) for n in range(LAYERS)],
        logprobs=True,
    )
    tensor_parallel = "tensor_parallel_size" in options  # there one worker keeps what both need
    drawn = {"max_tokens": 8, "temperature": 1.0, "sampling": {"seed": 3}, "logprobs": True}  # else one token repeats
    plain = lm.run(SHORT, **drawn)
    opening = plain.token_ids[0]
    inside = pc.Scale(0.5, pc.z[1], pc.generated & pc.between(opening, 511 - opening))
    if tensor_parallel:
        run = lm.run(SHORT, edits=inside, **drawn)
        static = pc.Scale(0.5, pc.z[1], run.acted["edits[0]"])
        assert run.logprobs == lm.run(SHORT, edits=static, **drawn).logprobs
        assert run.logprobs != plain.logprobs
    else:
        with pytest.raises(pc.UnsupportedSite, match="pipeline"):
            lm.run(SHORT, max_tokens=8, edits=inside)
    assert back.logprobs == kept.logprobs
    if tensor_parallel:
        for op in (
            pc.Ablate(VECTOR, pc.z[1]),
            pc.Clamp(VECTOR, pc.q[1], low=0.0),
            pc.Add(VECTOR, pc.z[1], norm="match"),
            pc.Rotate(np.eye(2, len(VECTOR)), 30, pc.q[1]),
            pc.Noise(0.1, pc.z[1], relative=True),
        ):
            with pytest.raises(pc.UnsupportedSite, match=r".\[1\] is sharded across 2 GPUs"):
                lm.run(SHORT, edits=[op], logprobs=True)
        with pytest.raises(pc.UnsupportedSite, match="sharded differently"):
            lm.run(SHORT, edits=[pc.Replace(pc.From(kept, pc.resid_post[0]), pc.z[1])], logprobs=True)
    for layer in (0, LAYERS - 1):  # only the stage that has the layer can know
        hot = [pc.Add([3e38] * D, at=pc.resid_post[layer], scale=1e30)]
        bad, good = lm.run([SHORT, SHORT], max_tokens=3, edits=[hot, []], logprobs=True)
        assert isinstance(bad.error, pc.RunError)
        assert good.error is None
    faults(lm)
    if tensor_parallel:
        a_batch_that_one_worker_cannot_open(lm)
    many = lm.run(
        [SHORT] * 20,
        max_tokens=2,
        edits=[[pc.Add(n * VECTOR, at=pc.resid_post[n % 4])] for n in range(20)],
        logprobs=True,
    )
    assert len({tuple(run.logprobs) for run in many}) == 20

    edits = [pc.Zero(pc.mlp_out[LAYERS - 1], pc.prompt[n]) for n in range(RECORDS + 1)]
    edits = [[pc.Zero(pc.resid_post[0])], [pc.Zero(pc.resid_post[0]), *edits], [pc.Zero(pc.resid_post[0])]]
    fits, full, again = lm.run(
        [LONG] * 3, max_tokens=2, edits=edits, logprobs=True
    )  # where stages have layers, the last one is full
    assert isinstance(full.error, pc.CapacityError)
    assert fits.logprobs == again.logprobs

    gone = pc.From(kept)
    kept.close()
    with pytest.raises(pc.MissingSource):
        lm.run(SHORT, max_tokens=4, edits=[pc.Replace(gone, at=pc.resid_post[0])], logprobs=True)
    del wide, brought, kept, back, bad, good, many, gone, fits, full, again
    gc.collect()
    lm.run(SHORT, max_tokens=1, logprobs=True)
    status = lm.engine.status()
    held = {"programs": 0, "runs": 0, "captured_bytes": 0, "pinned": 0, "vectors": 0, "records": 0}
    assert {name: status[name] for name in held} == held
    # of workers that see the same rows one counts; over two stages, a graded program is three requests
    assert status["failures"] == (6 if tensor_parallel else 11)
    assert status["self_checks"] > 100
    assert status["self_checks_failed"] == 0
    a_worker_that_dies_is_the_error_of_all(lm)


def test_an_unembedding_of_its_own_over_two_stages(start, tmp_path):
    """The first stage lacks it, and the last one lacks the embedding."""
    folder = with_weights(tmp_path, "0.6b", 2, **SHAPE, tie_word_embeddings=False)
    with pc.LM(folder, engine="vllm", dtype="float32", max_model_len=64, prove=False, skip_tokenizer_init=True,
               kv_cache_memory_bytes=1 << 25, pipeline_parallel_size=2) as lm:  # fmt: skip
        stored = {name: rows for file in tmp_path.glob("*.safetensors") for name, rows in load_file(file).items()}
        assert torch.equal(torch.as_tensor(lm.weights("W_U")), stored["lm_head.weight"].float().T)
        assert torch.equal(torch.as_tensor(lm.weights("W_E")), stored["model.embed_tokens.weight"].float())


def test_probes_of_every_request_over_two_workers(start):
    rows = np.random.default_rng(0).standard_normal((2, D)).astype(np.float32)
    given = {"probes": [pc.Probe(rows, pc.resid_post[1], name="p"), pc.Probe(rows[:1], pc.mlp_out[0], name="q")]}
    same = [pc.Probe(each.weight, each.at, name=f"own.{each.name}") for each in given["probes"]]
    lm, prompt = start(tensor_parallel_size=2, **given), list(range(100, 300))  # more than a block of 128 tokens
    for _ in range(2):
        run = lm.run(prompt, max_tokens=4, capture=same)
        for name in ("p", "q"):
            np.testing.assert_allclose(run.probes[name], run.probes[f"own.{name}"], atol=1e-5)
    assert run.cached_tokens == 0  # its own probes compute all of the prompt
    again = lm.run(prompt, max_tokens=4)
    assert again.cached_tokens == 128
    np.testing.assert_allclose(again.probes["p"], run.probes["p"], atol=1e-5)


@pytest.mark.parametrize("parts", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_attached_saes_over_two_workers(start, parts):
    """Each worker has the whole SAE: features and edits are what its numbers say."""
    draw = np.random.default_rng(1)
    numbers = [draw.standard_normal(shape).astype(np.float32) for shape in ((24, D), (24,), (24, D), (D,))]
    lm, saes = start(**parts), {"plain": pc.SAE(*numbers), "topk": pc.SAE(*numbers, k=3)}
    for name, sae in saes.items():
        lm.attach(sae, at=pc.resid_post[2], name=name)
    for name, sae in saes.items():
        ops = [pc.SetFeature(name, [3, 9], [2.0, 0.0]), pc.Reconstruct(name)]
        runs = lm.run([SHORT, LONG], max_tokens=4, edits=[
            [pc.Capture(pc.resid_post[2]), op, pc.Capture(pc.resid_post[2])] for op in ops
        ], capture=pc.Features(name, top=5), logprobs=True)  # fmt: skip
        for run, op in zip(runs, ops, strict=True):
            before, after = (run[f"edits[{i}]"].numpy() for i in (0, 2))
            f = sae.encode(before)[:, [3, 9]]
            changed = before + (np.array([2, 0]) - f) @ sae.decoder[[3, 9]]
            np.testing.assert_allclose(after, changed if op is ops[0] else sae.reconstruct(before), atol=1e-3)
            values = np.sort(sae.encode(after), 1)[:, ::-1][:, :5]
            np.testing.assert_allclose(run.features[name].values, values, rtol=1e-4, atol=1e-2)
    if "tensor_parallel_size" in parts:
        with pytest.raises(pc.UnsupportedSite, match="unsharded"):
            lm.attach(saes["plain"], at=pc.z[1], name="heads")
    lm.detach("plain")
    with pytest.raises(pc.UnknownName):
        lm.run(SHORT, capture=pc.Features("plain"))
