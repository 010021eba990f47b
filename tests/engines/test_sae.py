"""Attached SAEs on real models: features are those of the captured rows, and edits are what their formulas say."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

import patchclamp as pc

from ..conftest import WIDTH
from .conftest import CHUNKED, PROMPTS

D, F = WIDTH, 96
MODES = {"eager": ("vllm", {}), "chunks of 16": ("vllm", CHUNKED), "transformers": ("transformers", {})}
RNG = np.random.default_rng(11)
SITE, IN, OUT = "resid_post[3]", "mlp_in[4]", "mlp_out[4]"
ARGUMENTS = {"max_tokens": 4, "sampling": {"ignore_eos": True}, "logprobs": True}


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def sae_of(**fields) -> pc.SAE:
    """A random SAE whose features are active at about a third of the tokens."""
    return pc.SAE(**{
        "encoder": 0.1 * numbers(F, D), "encoder_bias": -0.3 + 0.1 * numbers(F), "decoder": 0.2 * numbers(F, D),
        "decoder_bias": 0.1 * numbers(D), "site": SITE, **fields,
    })  # fmt: skip


SAES = {
    "standard": sae_of(),
    "jumprelu": sae_of(threshold=np.abs(numbers(F))),
    "gated": sae_of(gain=np.exp(0.3 * numbers(F)), offset=0.5 * numbers(F)),
    "topk": sae_of(k=5),
    "normed": sae_of(normalize="layer_norm", encoder=numbers(F, D) / 10),
    "transcoder": sae_of(site=IN, site_out=OUT, skip=0.01 * numbers(D, D), k=7),
}
LOCAL = ("standard", "jumprelu", "gated")


@pytest.fixture(scope="module", params=MODES)
def lm(narrow, request):
    engine, options = MODES[request.param]
    lm = narrow.get(engine, "float32", **options)
    for name, sae in SAES.items():
        lm.attach(sae, name=name)
    yield lm
    for name in SAES:
        lm.detach(name)


def close(one, other, most: float = 1e-4) -> bool:
    one, other = (np.asarray(each, np.float64) for each in (one, other))
    return one.shape == other.shape and np.abs(one - other).max(initial=0) <= most * np.abs(other).max(initial=1.0)


def test_features_are_those_of_the_rows(lm):
    """The largest, and some by id, of prompts and generated tokens; the second time a prefix cache is warm."""
    ids = [5, 2, 90]
    for tokens in (pc.every, pc.prompt[-1], pc.generated):
        capture = [
            *(pc.Features(name, tokens, top=6) for name in SAES),
            pc.Capture(SITE, tokens),
            pc.Capture(IN, tokens),
        ]
        some = [pc.Features(name, tokens, ids=ids) for name in SAES]
        runs = lm.run([*PROMPTS, "x"], capture=capture, **ARGUMENTS)
        chosen = lm.run([*PROMPTS, "x"], capture=some, **ARGUMENTS)
        lm.lens([*runs, *chosen])
        for run, other in zip(runs, chosen, strict=True):
            assert set(run.features) == set(SAES)
            for name, sae in SAES.items():
                rows, found = run[IN if name == "transcoder" else SITE], run.features[name]
                values = sae.encode(rows.numpy())
                best = np.sort(values, 1)[:, ::-1][:, :6]
                assert found.positions == run.positions(SITE)
                assert close(found.values, best)
                assert close(np.take_along_axis(values, found.ids, 1), best)
                assert close(other.features[name].values, values[:, ids])
                assert other.features[name].ids.tolist() == [ids] * len(rows)
                frame = found.to_frame()
                assert len(frame) == (found.values > 0).sum()
                assert (frame["value"] > 0).all()
    twice = lm.run("x", edits=[pc.Features("standard", top=3), pc.SetFeature("standard", 5, 9.0)],
                   capture=pc.Features("standard", ids=[5]), max_tokens=1)  # fmt: skip
    before, after = twice.features["edits[0]"], twice.features["standard"]
    assert before.ids.shape == (1, 3)
    assert close(
        before.values,
        np.sort(SAES["standard"].encode(lm.run("x", capture=SITE, max_tokens=1)[SITE].numpy()))[:, ::-1][:, :3],
    )
    assert abs(after.values[0, 0] - before.values.max()) > 1
    with pytest.raises(pc.MissingSource, match="'none'"):
        run.features["none"]


def test_features_come_with_their_token(lm, monkeypatch):
    """The largest and some by id, at some tokens only, beside a lens: those of the rows, which are not read again."""
    rows = {"fetch_many": [], "lens_many": []}

    def counted(name):
        stock = getattr(lm.engine, name)

        def counting(wanted, *by):
            found = stock(wanted, *by)
            rows[name].append(sum(len(positions) for positions, *_ in found))
            return found

        monkeypatch.setattr(lm.engine, name, counting)

    for name in rows:
        counted(name)
    capture = [
        pc.Features("standard", top=6), pc.Features("topk", pc.generated, ids=[39, 81]), pc.Capture(SITE),
        pc.Features("transcoder", pc.prompt[-1], top=3), pc.Lens(pc.resid_post[2], top=2), pc.Capture(IN),
    ]  # fmt: skip
    for prompt, max_tokens in ((PROMPTS[1], 24), (PROMPTS[1], 1), ("x", 5)):
        for counts in rows.values():
            counts.clear()
        stream = lm.stream(prompt, capture=capture, **{**ARGUMENTS, "max_tokens": max_tokens})
        parts, length = list(stream), len(lm.tokens(prompt))
        read = {name: list(counts) for name, counts in rows.items()}
        run, at = stream.run, length
        assert run.token_ids == [token for part in parts for token in part.token_ids]
        for number, part in enumerate(parts):
            first, at = at if number else 0, at + len(part.token_ids)
            assert part.features["standard"].positions == list(range(first, min(at, length + max_tokens - 1)))
            assert part.lens["resid_post[2]"].positions == part.features["standard"].positions
        for name in ("standard", "topk", "transcoder"):
            found = [part.features[name] for part in parts]
            positions = [position for each in found for position in each.positions]
            ids, values = (np.concatenate([getattr(each, of) for each in found]) for of in ("ids", "values"))
            assert positions == run.features[name].positions
            every = SAES[name].encode(run[IN if name == "transcoder" else SITE].numpy())[positions]
            best = every[:, [39, 81]] if name == "topk" else np.sort(every, 1)[:, ::-1][:, : ids.shape[1]]
            assert close(values, best)
            assert close(np.take_along_axis(every, ids, 1), best)
        assert sum(read["fetch_many"]) <= (length + 1) + 2 * 3 * max_tokens  # a step is looked at, then read
        assert sum(read["lens_many"]) <= length + 3 * max_tokens
    assert not any(part.features for part in lm.stream("x", capture=[pc.Lens(pc.resid_post[2])], **ARGUMENTS))


def changed(sae: pc.SAE, op: pc.Op, read: np.ndarray, row: np.ndarray) -> np.ndarray:
    """The rows after an op, by its docstring, in double precision; `read` are those that are encoded."""
    if isinstance(op, pc.Reconstruct):
        return sae.reconstruct(read)
    f = sae.encode(read)[:, list(op.id)].astype(np.float64)
    value = np.array(op.value)
    v = {"set": np.broadcast_to(value, f.shape), "add": f + value, "scale": f * value}[op.mode]
    v = np.where(f > 0, v, f) if op.only_if_active else v
    scale = read.std(1, ddof=1, keepdims=True) if sae.normalize == "layer_norm" else 1.0
    return row + (v - f) @ sae.decoder[list(op.id)] * scale


OPS = {
    "set": lambda name: pc.SetFeature(name, [3, 40, 17], [4.0, 0.0, 2.5]),
    "ablate": lambda name: pc.SetFeature(name, list(range(30)), 0.0),
    "add": lambda name: pc.SetFeature(name, [8, 9], 3.0, pc.prompt, mode="add"),
    "add if active": lambda name: pc.SetFeature(name, list(range(20)), 3.0, mode="add", only_if_active=True),
    "scale": lambda name: pc.SetFeature(name, [*range(40)], 2.5, pc.prompt[1:] | pc.generated, mode="scale"),
    "set if active": lambda name: pc.SetFeature(name, [*range(40)], 9.0, only_if_active=True),
    "by token": lambda name: pc.SetFeature(name, [3, 4], 6.0, pc.token(260, 198)),
    "reconstruct": pc.Reconstruct,
    "reconstruct every second": lambda name: pc.Reconstruct(name, pc.every[::2]),
}


@pytest.mark.parametrize("what", OPS)
def test_edits_are_what_their_formulas_say(lm, what):
    """All SAEs in one batch, twice; rows of every selected token change by the formula, and no others."""
    prompts, edits = [], []
    for name in SAES:
        at, to = (IN, OUT) if name == "transcoder" else (SITE, SITE)
        op = OPS[what](name)
        for prompt in (PROMPTS[1], "x"):
            prompts.append(prompt)
            edits.append([pc.Capture(at), pc.Capture(to), op, pc.Capture(to)])
    for _ in range(2):
        runs = lm.run(prompts, edits=edits, **ARGUMENTS)
        moved = 0.0
        for run, program in zip(runs, edits, strict=True):
            op = program[2]
            read, before, after = (run[f"edits[{i}]"].double().numpy() for i in (0, 1, 3))
            where = run.acted["edits[2]"]
            expected = before.copy()
            expected[where] = changed(SAES[op.name], op, read[where].astype(np.float32), before[where])
            assert close(after, expected)
            moved = max(moved, np.abs(after - before).max())
        assert moved > 0.1


def is_between(tokens: list[int], opening: int, closing: int) -> bool:
    """True if the last token is strictly between delimiters."""
    last = next((token for token in reversed(tokens) if token in (opening, closing)), closing)
    return last == opening and tokens[-1] != opening


def test_rows_between_generated_delimiters_are_what_the_formula_says(lm):
    """Of SAEs that need the whole encoder, too: the delimiters are known only as they are generated."""
    options = {**ARGUMENTS, "max_tokens": 20}
    plain = lm.run("One two three four", **options)
    opening, *others = dict.fromkeys(plain.token_ids[1:])
    tokens, hits = pc.generated & pc.between(opening, others[-1]), dict.fromkeys(SAES, 0)
    ops = [
        op for name in SAES for op in (pc.SetFeature(name, [3, 40], [7.0, 0.0], tokens), pc.Reconstruct(name, tokens))
    ]
    places = [(IN, OUT) if op.name == "transcoder" else (SITE, SITE) for op in ops]
    edits = [[pc.Capture(at), pc.Capture(to), op, pc.Capture(to)] for (at, to), op in zip(places, ops, strict=True)]
    for run, op in zip(lm.run(["One two three four"] * len(ops), edits=edits, **options), ops, strict=True):
        read, before, after = (run[f"edits[{i}]"].double().numpy() for i in (0, 1, 3))
        length, ids = len(run.prompt_token_ids), [*run.prompt_token_ids, *run.token_ids]
        where = [p for p in range(length, len(before)) if is_between(ids[: p + 1], opening, others[-1])]
        expected = before.copy()
        expected[where] = changed(SAES[op.name], op, read[where].astype(np.float32), before[where])
        assert close(after, expected)
        assert np.array_equal(np.delete(after, where, 0), np.delete(before, where, 0))
        assert run.acted["edits[2]"] == where
        if where:
            assert np.abs(after - before)[where].max(1).min() > 0.1
        assert len(where) < len(before) - length
        hits[op.name] += len(where)
    assert min(hits.values()) > 0


def test_an_identity_changes_no_bit(lm):
    eye = np.eye(D, dtype=np.float32)
    both = np.concatenate([eye, -eye])
    lm.attach(pc.SAE(both, np.zeros(2 * D), both, np.zeros(D)), at=pc.resid_post[2], name="identity")
    try:
        plain, same, still = (  # one by one, in the same chunks
            lm.run(PROMPTS[1], edits=edits, capture=pc.resid_post, **ARGUMENTS)
            for edits in ([], [pc.Reconstruct("identity")], [pc.SetFeature("identity", 5, 1.0, mode="scale")])
        )
    finally:
        lm.detach("identity")
    for run in (same, still):
        assert run.token_ids == plain.token_ids
        for layer in range(8):
            assert torch.equal(run[pc.resid_post[layer]], plain[pc.resid_post[layer]])


def test_features_are_of_the_sae_that_was_attached_when_they_were_computed(lm):
    lm.attach(SAES["topk"], name="a")
    run = lm.run("x", capture=[pc.Features("a", ids=range(8)), SITE], **ARGUMENTS)
    lm.detach("a")
    lm.attach(SAES["jumprelu"], name="a")
    try:
        other = lm.run("x", capture=pc.Features("a", ids=range(8)), **ARGUMENTS)
    finally:
        lm.detach("a")
    assert close(run.features["a"].values, SAES["topk"].encode(run[SITE].numpy())[:, :8])
    assert close(other.features["a"].values, SAES["jumprelu"].encode(run[SITE].numpy())[:, :8])


def test_of_a_row_its_features_alone_are_kept(lm):
    gc.collect()  # runs of other tests
    lm.engine.status()  # they are freed before the next
    before = lm.engine.status()["captured_bytes"]
    runs = lm.run([*PROMPTS, "x"], capture=[pc.Features("standard", top=6), pc.Features("topk", ids=[1])], **ARGUMENTS)
    tokens = sum(len(run.prompt_token_ids) + len(run.token_ids) - 1 for run in runs)
    assert 0 <= lm.engine.status()["captured_bytes"] - before - 8 * 7 * tokens < 100


def test_graded_cells_equal_requests(lm):
    programs = [pc.SetFeature(name, [i, i + 1], float(i)) for i in range(4) for name in LOCAL]
    grades = lm.grade(PROMPTS[0], programs, score=[260, 198])
    runs = lm.run([PROMPTS[0]] * len(programs), edits=[[op] for op in programs], max_tokens=1, score=[260, 198])
    assert close(grades.logprobs, [list(run.scores.values()) for run in runs], 1e-3)
    assert np.abs(grades.logprobs - grades.baseline).max() > 1e-2
    whole = lm.grade(PROMPTS[0], [pc.SetFeature("topk", 3, 5.0)], score=[260])
    assert whole.route == "requests"


def test_what_cannot_be_is_refused(lm):
    sae = SAES["standard"]
    refused = [
        (lambda: lm.attach(sae, name="standard"), pc.ProgramError, "name: .*'standard'"),
        (lambda: lm.attach("folder", name="a"), pc.ProgramError, "sae: expected a pc.SAE"),
        (lambda: lm.attach(sae, at=pc.resid_post, name="a"), pc.UnsupportedSite, "at: .*one layer"),
        (lambda: lm.attach(sae, at=pc.neurons[3], name="a"), pc.ShapeError, r"at: .*neurons\[3\]"),
        (lambda: lm.attach(sae, at=pc.logits, name="a"), pc.UnsupportedSite, "at: .*logits"),
        (lambda: lm.attach(sae, name="a b"), pc.ProgramError, "expected a name"),
        (lambda: lm.attach(sae, name="a", precision="half"), pc.PatchclampError, "precision"),
        (lambda: lm.attach(sae, name="a", to=pc.resid_post[2]), pc.UnsupportedSite, r"to: expected a site at or after"),
        (lambda: lm.detach("a"), pc.UnknownName, "SAE 'a'"),
        (lambda: lm.run("x", capture=pc.Features("a")), pc.UnknownName, r"capture\[0\].name"),
        (lambda: lm.run("x", capture=pc.Features("topk", top=F + 1)), pc.ProgramError, r"capture\[0\].top: .* at most 96"),
        (lambda: lm.run("x", edits=pc.SetFeature("topk", F, 1.0)), pc.ProgramError, r"edits\[0\].id: .* 0 to 95, got 96"),
    ]  # fmt: skip
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()
    assert "a" not in lm.sites.dictionaries


@pytest.mark.parametrize("name", LOCAL)
def test_a_condition_on_features(lm, name):
    """It holds where the features of the captured rows say so, of prompts and generated tokens."""
    sae, read = SAES[name], pc.Features(name, ids=[40, 12])
    push = pc.Add(numbers(D), at=pc.resid_post[5])
    conditions = [read[0] > 0.25, read[1] > 0, ~(read[0] >= 0.5) & (read[1] <= 0.75), read[0] < 0.125]
    runs = lm.run(
        [PROMPTS[1]] * 4, edits=[[pc.When(each, push)] for each in conditions], capture=pc.Capture(SITE), **ARGUMENTS
    )
    acted = set()
    for number, run in enumerate(runs):
        f, g = sae.encode(run[SITE].numpy())[:, [40, 12]].T
        held = [f > 0.25, g > 0, ~(f >= 0.5) & (g <= 0.75), f < 0.125][number]
        assert run.acted["edits[0].edits[0]"] == np.flatnonzero(held).tolist()
        assert list(run.probes) == []
        acted |= set(held.tolist())
    assert acted == {True, False}
    refused = [
        (pc.Features("topk", ids=[3])[0] > 1, "'topk'"), (pc.Features(name)[0] > 1, "index into ids"),
        (read[0] > -1, "got -1"), (pc.Features(name, ids=[F])[0] > 1, "from 0 to 95"),
    ]  # fmt: skip
    for condition, message in refused:
        with pytest.raises(pc.ProgramError, match=rf"edits\[0\].condition.*{message}"):
            lm.run("x", edits=pc.When(condition, push))
    named = pc.Probe(numbers(D), at=SITE, name=f"{name}.40")
    for edits in ([named, pc.When(read[0] > 1, push)], [pc.When(read[0] > 1, push), named]):
        with pytest.raises(pc.ProgramError, match=rf"duplicate name '{name}.40'"):
            lm.run("x", edits=edits)
    with pytest.raises(pc.ProgramError, match="local encoder"):
        lm.run("x", edits=pc.When(read[0] > 1, pc.SetFeature("topk", 1, 2.0)))


def test_an_sae_of_one_head(lm):
    """It reads and writes the head's columns, and no others."""
    head = pc.SAE(0.5 * numbers(24, 64), numbers(24) - 0.5, numbers(24, 64), np.zeros(64))
    lm.attach(head, at=pc.z[4, 3], name="head")
    try:
        op, at = pc.SetFeature("head", [1, 2], [3.0, 0.0]), pc.z[4]
        run = lm.run(
            PROMPTS[1], edits=[pc.Capture(at), op, pc.Capture(at)], capture=pc.Features("head", top=5), **ARGUMENTS
        )
    finally:
        read = run.features["head"]
        lm.detach("head")
    before, after = (run[f"edits[{i}]"].numpy() for i in (0, 2))
    expected = before.copy()
    expected[:, 3] = changed(head, op, before[:, 3], before[:, 3])
    assert close(after, expected)
    assert np.array_equal(after[:, [0, 1, 2, 4]], before[:, [0, 1, 2, 4]])
    assert close(read.values, np.sort(head.encode(after[:, 3]), 1)[:, ::-1][:, :5])
