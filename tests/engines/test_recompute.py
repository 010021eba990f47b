"""Runs that are computed from a cut on equal those that are computed whole, on Transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import patchclamp as pc
from patchclamp.engines import recompute
from patchclamp.errors import CapacityError, RunError, UnknownName
from patchclamp.proving import prove

from ..models import no_table, of_family

IDS = {"engine": "transformers", "dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 8, "prove": False}
PROMPT, OTHER = list(range(5, 25)), list(range(100, 117))  # longer than the families' windows
SOME = ["llama", "gemma2", "gpt2", "gpt_neox", "opt", "qwen3_moe", "gpt_oss", "deepseek_v2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return of_family(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def both(folder):
    """The same model, computed from cuts on and whole."""
    options = {**IDS, "allow_code": True}
    with pc.LM(folder, **options) as changed, pc.LM(folder, **options, recompute="all") as whole:
        yield changed, whole


def selection(generator: np.random.Generator, length: int) -> pc.Selection:
    kind, at = generator.integers(4), int(generator.integers(length))
    return [pc.prompt[at], pc.prompt[at : at + 3], pc.prompt[-1], pc.generated][kind]


WORDS = ("resid_pre", "attn_out", "mlp_out", "resid_post")


def op(kind: int, at: pc.Site, tokens: pc.Selection, row: np.ndarray, clean: pc.Run) -> pc.Op:
    made = {
        0: lambda: pc.Add(row, at=at, tokens=tokens, scale=2.0),
        1: lambda: pc.Zero(at, tokens=tokens),
        2: lambda: pc.Scale(-1.0, at=at, tokens=tokens),
        3: lambda: pc.Noise(1.0, at=at, tokens=tokens, seed=7),
        4: lambda: pc.Replace(pc.From(clean, at, 2), at=at, tokens=tokens),
        5: lambda: pc.Capture(at, tokens=tokens),
    }
    return made[kind]()


def program(lm: pc.LM, clean: pc.Run, generator: np.random.Generator) -> list[pc.Op]:
    """A program of two ops at random places of the layers."""
    length = len(clean.prompt_token_ids)
    return [
        op(
            int(generator.integers(6)),
            pc.Site(WORDS[generator.integers(4)], int(generator.integers(lm.sites.layers))),
            selection(generator, length),
            generator.normal(size=lm.model.d_model).astype(np.float32),
            clean,
        )
        for _ in range(2)
    ]


def answers(lm: pc.LM) -> list[pc.Run]:
    """The same forty runs on each model: most of one prompt, some of another, some without a program."""
    generator = np.random.default_rng(3)
    clean = lm.run(OTHER, max_tokens=4, capture=[pc.Site(word) for word in WORDS])
    prompts = [OTHER if generator.integers(5) == 0 else PROMPT for _ in range(40)]
    programs = [[] if i % 9 == 0 else program(lm, clean, generator) for i in range(40)]
    return lm.run(prompts, max_tokens=4, edits=programs, capture=[pc.final_norm @ pc.prompt[-1]],
                  sampling={"ignore_eos": True}, logprobs=True, score=[7, 8])  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_random_programs_give_what_they_give_whole(tmp_path, name):
    where = of_family(tmp_path, name)
    with pc.LM(where, **IDS) as changed, pc.LM(where, **IDS, recompute="all") as whole:
        runs, expected = answers(changed), answers(whole)
        assert all(run.computed_from is None for run in expected)
        cuts = [run.computed_from for run in runs if run.computed_from is not None]
        assert len(cuts) >= 20
        assert max(layer for layer, _ in cuts) > 0 < max(position for _, position in cuts)
        for run, other in zip(runs, expected, strict=True):
            assert run.token_ids == other.token_ids
            assert run.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert run.scores == pytest.approx(other.scores, abs=1e-4)
            for site, rows in captured(other).items():
                torch.testing.assert_close(run[site], rows, rtol=1e-4, atol=1e-4)
                assert run.positions(site) == other.positions(site)
        assert len({tuple(run.logprobs) for run in expected}) > 20  # the programs do something
        counts = changed.engine.status()
        assert counts["batches_from_cut"] > 0 == whole.engine.status()["batches_from_cut"]
        assert (counts["programs"], counts["pinned"]) == (0, 0)


def captured(run: pc.Run) -> dict[str, torch.Tensor]:
    """What a run captured, by site."""
    sites = {str(at) for op in run.program.ops if isinstance(op, pc.Capture) for at in [op.at]} | {"final_norm"}
    return {site: run[site] for site in sorted(sites)}


AT = {"at": pc.pattern[2, 1], "tokens": pc.prompt[-1]}


@pytest.mark.parametrize(
    "pair",
    [
        [pc.Capture(pc.mlp_out[2], project=np.ones((2, 128))), pc.Capture(pc.mlp_out[2])],
        [pc.Replace([0.5, 0.5], **AT), pc.Scale(0.5, **AT)],
        [pc.Apply(lambda h: 2 * h, at=pc.mlp_out[2], tokens=pc.prompt[-1]), pc.Scale(0.5, **AT)],
    ],
    ids=["one matrix", "one row", "one function"],
)
def test_programs_of_one_kind_with_other_fields_share_a_prompt(both, pair):
    """A capture may have a matrix, an edit of a pattern a row or keys; these, code and patterns run as code."""
    edits = [[pair[i == 0]] for i in range(9)]
    changed, whole = (lm.run([PROMPT] * 9, max_tokens=1, edits=edits, logprobs=True, score=[7]) for lm in both)
    for ours, theirs in zip(changed, whole, strict=True):
        assert ours.computed_from is not None
        assert ours.scores == pytest.approx(theirs.scores, abs=1e-5)
        if isinstance(pair[0], pc.Capture):
            torch.testing.assert_close(ours["edits[0]"], theirs["edits[0]"], atol=1e-5, rtol=1e-5)
    assert isinstance(pair[0], pc.Capture) == (changed[0].scores == pytest.approx(changed[1].scores, abs=1e-6))


def test_a_self_patch_is_bit_identical_in_passes_of_one_shape(both):
    """What runs capture, as many write back where it came from, computed from the same cuts on."""
    lm, _ = both
    places = [(layer, position) for layer in (1, 2) for position in range(10, 20)]
    asked = {"max_tokens": 3, "sampling": {"ignore_eos": True}, "logprobs": True}
    clean = lm.run([PROMPT] * 20, **asked, capture=[[pc.resid_pre[layer] @ pc.prompt[p]] for layer, p in places])
    own, other = (
        lm.run([PROMPT] * 20, **asked, edits=[
            [pc.Replace(pc.From(run, pc.resid_pre[layer], p), at=pc.resid_pre[layer], tokens=pc.prompt[p - shift])]
            for run, (layer, p) in zip(clean, places, strict=True)])
        for shift in (0, 1)
    )  # fmt: skip
    for run, same, moved in zip(clean, own, other, strict=True):
        assert same.computed_from == run.computed_from is not None
        assert same.logprobs == run.logprobs != moved.logprobs


def test_what_cannot_leave_a_trunk_is_computed_whole_and_says_why(folder, tmp_path, both):
    changed, whole = both
    edits = [[pc.Zero(pc.resid_post[1], tokens=pc.prompt[p])] for p in range(10, 20)]
    assert all(run.computed_from is not None for run in changed.run([PROMPT] * 10, max_tokens=1, edits=edits))
    assert [finding.status for finding in changed.engine.report()] == ["ok"]
    assert changed.engine.whole_because.startswith("too few runs share a prompt")
    assert whole.engine.whole_because == 'recompute="all"'
    with changed.engine.computing_whole():
        assert all(run.computed_from is None for run in changed.run([PROMPT] * 10, max_tokens=1, edits=edits))
    with no_table("Starcoder2ForCausalLM"), pc.LM(of_family(tmp_path, "starcoder2"), **IDS) as untabled:
        runs = untabled.run([PROMPT] * 10, max_tokens=1, edits=edits)
        assert all(run.computed_from is None for run in runs)
        assert "no site table" in untabled.engine.whole_because
    with pytest.raises(UnknownName, match=r"'some'.*changed, all"):
        pc.LM(folder, **IDS, recompute="some")


def test_sites_are_proved_in_the_batches_that_the_proof_makes(folder):
    """Programs beside a longer prompt show whether padding counts; from a cut on there would be none."""
    with pc.LM(folder, **IDS) as lm:
        proofs = prove(lm, full=True)
        assert all(proof.holds for proof in proofs)
        assert len(proofs) == len(lm.sites.names)
        counts = lm.engine.status()
        assert counts["batches_from_cut"] == 0 < counts["batches_whole"]


def test_behind_a_window_that_the_proof_did_not_fill_everything_is_computed(tmp_path):
    edits = [[pc.Zero(pc.resid_post[1], tokens=pc.prompt[-p])] for p in range(1, 11)]
    with pc.LM(of_family(tmp_path, "mistral", sliding_window=128), **IDS) as lm:
        for length, may_cut in ((20, True), (128, True), (129, False)):
            runs = lm.run([[*range(5, 5 + length)]] * 10, max_tokens=1, edits=edits)
            assert all((run.computed_from is not None) == may_cut for run in runs), length


@pytest.mark.parametrize("wrong", ["stream", "positions", "generation", "error"])
def test_a_model_on_which_it_would_be_wrong_is_computed_whole(folder, both, monkeypatch, caplog, wrong):
    class Wrong(recompute.PassesFromCut):
        def __init__(self, origin, layers, cut, count):
            if wrong == "error":
                raise ValueError("its layers take something else")
            super().__init__(origin, layers, cut, count)
            if wrong == "positions":
                self.positions_BT = self.positions_BT - 1
            self.layer = cut.layer

        def run(self, net):
            first = self._trunk is not None
            if first and wrong == "stream":
                self._trunk.stream[self.layer] = self._trunk.stream[self.layer] * 1.01
            logits = super().run(net)
            if first and wrong == "generation" and self.layer > 0:
                self.cache.layers[0].keys = self.cache.layers[0].keys + 1.0
            return logits

    monkeypatch.setattr(recompute, "PassesFromCut", Wrong)
    edits = [[pc.Zero(pc.resid_post[1], tokens=pc.prompt[p])] for p in range(10, 20)]
    with pc.LM(folder, **IDS) as lm:
        runs = lm.run([PROMPT] * 10, max_tokens=2, edits=edits, logprobs=True)
        assert all(run.computed_from is None for run in runs)
        assert ("something else" if wrong == "error" else "differ") in lm.engine.whole_because
        assert [line.getMessage().count(lm.engine.whole_because) for line in caplog.records] == [1]
        assert [finding.status for finding in lm.engine.report()] == ["note"]
        again = lm.run([PROMPT] * 10, max_tokens=2, edits=edits, logprobs=True)
    expected = both[1].run([PROMPT] * 10, max_tokens=2, edits=edits, logprobs=True)
    for run, second, other in zip(runs, again, expected, strict=True):
        assert run.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert second.logprobs == other.logprobs  # in the same batches


def test_an_error_is_its_own_runs(both):
    lm, whole = both
    edits = [[pc.Zero(pc.resid_post[1], tokens=pc.prompt[p])] for p in range(10, 20)]
    edits[3] = [pc.Scale(3e38, at=pc.resid_post[1], tokens=pc.prompt[12])]
    runs, expected = (m.run([PROMPT] * 10, max_tokens=2, edits=edits, logprobs=True) for m in (lm, whole))
    for i, (run, other) in enumerate(zip(runs, expected, strict=True)):
        if i == 3:
            assert isinstance(run.error, RunError)
            assert str(run.error) == str(other.error)
        else:
            assert run.computed_from is not None
            assert run.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_programs_that_a_cut_brought_together_wait_for_room(folder, both):
    """A batch of eight has room for three of these programs. One that never fits is an error."""
    edits = [[pc.Zero(pc.resid_post[1:3], tokens=pc.prompt[p]), pc.Zero(pc.mlp_out[2], tokens=pc.prompt[p])]
             for p in range(10, 20)]  # fmt: skip
    expected = both[1].run([PROMPT] * 10, max_tokens=2, edits=edits, logprobs=True)
    edits[4] = [pc.Zero(pc.attn_out[1:3], tokens=pc.prompt[p]) for p in range(10, 19)]
    with pc.LM(folder, **IDS, max_records=10) as lm:
        runs = lm.run([PROMPT] * 10, max_tokens=2, edits=edits, logprobs=True)
        assert isinstance(runs[4].error, CapacityError)
        assert lm.engine.status()["records"] == 0
    for i, (run, other) in enumerate(zip(runs, expected, strict=True)):
        if i != 4:
            assert run.computed_from is not None
            assert run.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_code_sees_the_same_rows_and_positions(folder):
    def answers(way: str) -> tuple[list[list[int]], list[torch.Tensor]]:
        positions_seen, rows_seen = [], []

        def look(rows, positions):
            positions_seen.append(positions.tolist())
            rows_seen.append(rows)
            return rows + 1.0

        edits = [[pc.Apply(look, at=pc.resid_post[1], tokens=pc.prompt[p : p + 2])] for p in range(9, 18)]
        with pc.LM(folder, **{**IDS, "max_num_seqs": 16}, recompute=way, allow_code=True) as lm:
            runs = lm.run([PROMPT] * 9, max_tokens=2, edits=edits)
            assert all((run.computed_from is not None) == (way == "changed") for run in runs)
        return positions_seen, rows_seen

    (positions, rows), (expected, theirs) = answers("changed"), answers("all")
    assert positions == expected == [[p, p + 1] for p in range(9, 18)]
    torch.testing.assert_close(torch.stack(rows), torch.stack(theirs), rtol=1e-4, atol=1e-4)


def test_a_sweep_says_how_its_cells_were_computed_and_they_are_the_same(both):
    corrupt = [*PROMPT]
    corrupt[4] = 200
    asked = {"clean": PROMPT, "corrupt": corrupt, "answer": 11, "foil": 12, "sites": [pc.resid_pre, pc.attn_out]}
    fast, plain = (pc.studies.patch_sweep(lm, **asked, metric="logit_diff", batch=64) for lm in both)
    assert np.abs(fast.values - plain.values).max() <= 1e-4 < np.abs(plain.values - plain.corrupt).max()
    assert fast.computed.startswith("recomputed from the first edit")
    assert plain.computed == 'computed whole: recompute="all"'
    assert fast.provenance == plain.provenance
    assert fast.noise_floor <= 1e-5
