"""Traces that are wrong: each raises the error that says so, at its line, before anything runs; none returns."""

# ruff: noqa: PT012, RUF043  a trace is a block, and its error comes at the block's end
from __future__ import annotations

import asyncio
import copy
import pickle
import weakref

import numpy as np
import pytest
import torch

import patchclamp as pc

pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
EIFFEL, COLOSSEUM = "The Eiffel Tower is in", "The Colosseum is in"
V = torch.ones(16)
E, U, S, X, K = pc.ProgramError, pc.UnknownName, pc.ShapeError, pc.UnsupportedSite, pc.TokensError


@pytest.fixture
def no_run(lm, monkeypatch):
    """Fails a test in which anything runs."""

    def run(*_, **__):
        raise AssertionError("it ran")

    monkeypatch.setattr(lm.engine, "submit", run)


def put(view, key, value):
    view[key] = value


def loop(value):
    for _ in value:
        pass


IN_A_LINE = {
    # what is not known before the trace has run
    "a branch on a value": (lambda t: "yes" if t.layers[1].output[-1] > 0 else "no", E, "a comparison needs a number"),
    "the truth of a value": (lambda t: bool(t.layers[1].output[-1]), E, "`if`, `and`, `or` and `not` need a number"),
    "the truth of a sum": (lambda t: not (t.layers[1].output[-1] + 1), E, "save the value"),
    "float()": (lambda t: float(t.layers[1].output[-1]), E, r"float\(\) needs a number"),
    "int()": (lambda t: int(t.layers[1].output[-1]), E, r"int\(\) needs a number"),
    "len()": (lambda t: len(t.layers[1].output), E, r"len\(\) needs a number"),
    "a loop": (lambda t: loop(t.layers[1].output), E, "a loop needs a number"),
    "in": (lambda t: 3 in t.layers[1].output, E, "`in` needs a number"),
    "equality": (lambda t: t.layers[1].output == 0, E, "a comparison needs a number"),
    "an index": (lambda t: [1, 2][t.logits[-1]], E, "an index needs a number"),
    "NumPy's array": (lambda t: np.asarray(t.layers[1].output), E, "NumPy needs a number"),
    "a saved value": (lambda t: t.layers[1].output.save().sum(), E, "save it and compute after the trace"),
    "a saved value's truth": (lambda t: bool(t.layers[1].output.save()), E, "need a number"),
    "a saved value's shape": (lambda t: t.layers[1].output.save().shape, E, "no 'shape'"),
    "a saved value's row": (lambda t: t.layers[1].output.save()[-1], E, "until the trace ends"),
    "a saved value in torch": (lambda t: torch.softmax(t.logits.save(), -1), E, "torch's softmax"),
    "a copy of a saved value": (lambda t: torch.tensor(t.embed.save()), E, "into another tensor"),
    "a tensor of a saved value": (lambda t: torch.Tensor(t.embed.save()), E, "into another tensor"),
    "torch's old tensors": (lambda t: torch.FloatTensor(t.embed.save()), E, "into another tensor"),
    "a saved value in a list": (lambda t: torch.tensor([t.embed.save()]), E, "a number"),
    "a saved value's row written": (lambda t: put(t.embed.save(), -1, 0), E, "until the trace ends"),
    "a format": (lambda t: f"{t.embed[-1]:.2f}", E, "format '.2f'"),
    "a saved value's format": (lambda t: f"{t.embed[-1].save():.2f}", E, "format '.2f'"),
    "a cache": (lambda t: t.cache(pc.resid_post)["resid_post[1]"], E, "until the trace ends"),
    "the run": (lambda t: t.run, E, "has not run yet"),
    "the text": (lambda t: t.text, E, "has not run yet"),
    # what a program cannot compute
    "a product of values": (lambda t: t.layers[1].output * t.layers[0].output, E, "times another"),
    "a product in place": (lambda t: t.layers[1].output.__imul__(t.embed), E, "times another"),
    "a quotient of values": (lambda t: t.layers[1].output / t.embed, E, "divided by another"),
    "a reciprocal": (lambda t: 1 / t.layers[1].output, E, "a number divided by"),
    "division by zero": (lambda t: t.layers[1].output / 0, E, "by zero"),
    "a power": (lambda t: t.layers[1].output ** 2, E, "a power"),
    "a matrix product": (lambda t: t.layers[1].output @ torch.eye(16), E, "a matrix product"),
    "a matrix product from the left": (lambda t: torch.eye(16) @ t.layers[1].output[-1], E, "torch's matmul"),
    "torch's function": (lambda t: torch.relu(t.layers[1].output), E, r"torch's relu .*\.apply\(fn\)"),
    "torch.where": (lambda t: torch.where(V > 0, t.embed, 0.0), E, "torch's where"),
    "torch.cat": (lambda t: torch.stack([t.embed[0], t.embed[1]]), E, "torch's stack"),
    "a method of tensors": (lambda t: t.layers[1].output.norm(dim=-1), E, "no 'norm'.*save, shape, clone"),
    "a method in place": (lambda t: t.layers[1].output[-1].add_(V), E, r"`\+= value`"),
    "a fill in place": (lambda t: t.layers[1].output[-1].zero_(), E, r"`\[...\] = 0`"),
    "a clamp by element": (lambda t: t.layers[1].output.clamp(-1, 1), E, "did you mean 'clamp_along'"),
    "a plain tensor changed": (lambda t: V.clone().__setitem__(0, t.embed[0]), E, "write into the model"),
    "a plain tensor added to": (lambda t: V.clone().__iadd__(t.embed[0]), E, "use x = x \\+ value"),
    "a vector that is no mask": (lambda t: t.layers[1].output.__imul__(1e-5 * V), E, "mask"),
    "another's read times a vector": (lambda t: put(t.layers[1].output, -1, t.embed[0] * V), E, "times a vector"),
    "complex numbers": (lambda t: put(t.layers[1].output, -1, V * 1j), S, "expected real numbers"),
    "a complex number": (lambda t: t.layers[1].output.__iadd__(1j), E, "expected a number or a vector"),
    "complex numbers in a list": (lambda t: put(t.layers[1].output, -1, [1j] * 16), S, "list: expected a tensor or a list of numbers"),
    "numbers as text": (lambda t: put(t.layers[1].output, -1, ["1"] * 16), S, "list: expected a tensor or a list of numbers"),
    "a copy of Python's": (lambda t: copy.copy(t.embed), E, r"\.clone\(\)"),
    "a deep copy": (lambda t: copy.deepcopy(t.embed.save()), E, r"\.clone\(\)"),
    "a pickle": (lambda t: pickle.dumps(t.embed), E, "pickle needs a number"),
    "a sum's row written": (lambda t: put(t.embed + 1, 0, 0), E, "change a clone"),
    "words": (lambda t: t.layers[1].output + "v", E, "expected a number or a vector"),
    "None": (lambda t: put(t.layers[1].output, -1, None), E, "expected a number or a vector"),
    "a flag": (lambda t: put(t.layers[1].output, -1, True), E, "bool: expected a number, got bool True"),
    "a computed value blended in": (lambda t: t.layers[1].output.replace(2 * t.embed), E, "computed value"),
    "numbers that are not finite": (lambda t: put(t.layers[1].output, -1, float("nan")), E, "expected a finite number, got"),
    "no Apply without leave": (lambda t: t.layers[1].output.apply(lambda h: h), E, "allow_code=True"),
    "a function of nothing": (lambda t: t.layers[1].output.apply(3), E, "expected a function of rows, got"),
    # what is not there
    "a layer too far": (lambda t: t.layers[3].output, X, "3 layers"),
    "a layer too far back": (lambda t: t.layers[-4].output, X, "3 layers"),
    "a head too many": (lambda t: t.layers[1].attn.z[2], X, "2 heads") ,
    "a position too far": (lambda t: t.layers[1].output[6].save(), K, "the prompt has 6 tokens"),
    "a position written too far": (lambda t: put(t.layers[1].output, 6, 0), K, "the prompt has 6 tokens"),
    "a span that is not there": (lambda t: t.layers[1].output[pc.span("Rome")].save(), K, "not in the prompt"),
    "a token never generated": (lambda t: t.generated[3].layers[1].output.save(), K, "raise max_tokens"),
    "no token generated": (lambda t: put(t.generated.layers[1].output, slice(None), 0), K, "selects no position"),
    "tokens twice": (lambda t: t.layers[1].output[[1, 1]].save(), K, "duplicate"),
    "tokens chosen twice": (lambda t: t.layers[1].output[0:3][1], E, "already selected"),
    "generated from their end": (lambda t: t.generated[-1].layers[1].output, K, "negative"),
    "a mask of tokens": (lambda t: t.layers[1].output[torch.ones(6) > 0].save(), E, "mask.nonzero"),
    "a list of truths": (lambda t: put(t.layers[1].output, [True, False], 0), E, "got a mask"),
    "an index of two axes": (lambda t: t.layers[1].output[torch.tensor([[0, 1], [1, 2]])], E, "axes"),
    "no token read": (lambda t: t.layers[1].output[3:3].save(), K, "selects no token"),
    "no step to loop over": (lambda t: loop(t.generated), K, "raise max_tokens"),
    "a list of heads": (lambda t: t.layers[1].attn.z[[0, 1]], E, "contiguous slice"),
    "a mask of heads": (lambda t: t.layers[1].attn.z[torch.tensor([True, False])], E, "contiguous slice"),
    "a tensor of neurons": (lambda t: t.layers[1].mlp.neurons[torch.tensor([5, 9])], E, r"neurons\[2:5\]"),
    "a tensor of layers": (lambda t: t.resid_post[torch.tensor([0, 1])], E, "expected an integer"),
    "all columns of a row": (lambda t: put(t.layers[1].attn.output[0], slice(None), 0), E, "module.output in nnsight"),
    "a row's columns, all said": (lambda t: t.layers[1].output[0][...], E, "nnsight"),
    "the last token of a tuple's first": (lambda t: t.layers[1].output[0][-1], E, "nnsight"),
    "a batch of a tuple's first": (lambda t: put(t.layers[1].output[0], (slice(None), -1), 0), E, "nnsight"),
    "the logits of a tuple's first": (lambda t: t.logits[0][-1], E, "nnsight"),
    "columns of the stream": (lambda t: t.layers[1].output[-1, 3], E, "single elements of a row"),
    "columns written": (lambda t: put(t.layers[1].output, (-1, 3), 0), E, "single elements of a row"),
    "a new axis": (lambda t: t.layers[1].output[None], E, "expected numbers, slices"),
    "an ellipsis": (lambda t: t.layers[1].output[..., -1], E, "expected numbers, slices"),
    "no batch axis in nnterp's name": (lambda t: t.layers_output[1][-2], E, r"\[:, -2\] or \[0, -2\]"),
    "a batch axis in ours": (lambda t: t.layers[1].output[0, -1], E, "single elements of a row"),
    "logits of the prompt": (lambda t: t.logits[2], E, "last token"),
    "logits with a batch axis": (lambda t: t.logits[0, -1], E, "single elements of a row"),
    "attention weights": (lambda t: t.attention_probabilities[3], U, "attention weights: use pattern"),
    "attention weights of a module": (lambda t: t.layers[1].attn.pattern, X, "fused kernel"),
    "a site of another model": (lambda t: t.layers[1].mlp.router, X, "router is not available"),
    "a name that is none": (lambda t: t.resid_pots[3], U, "did you mean 'resid_post'"),
    "a module's name that is none": (lambda t: t.layers[1].mlp.outptu, U, "did you mean 'output'"),
    "a norm": (lambda t: t.norm.output, U, "t.final_norm"),
    "a head of the model": (lambda t: t.lm_head.output, U, "t.logits"),
    "nnterp's lens": (lambda t: t.project_on_vocab(t.embed), U, r"t.layers\[-1\].output\[-1\] ="),
    "nnterp's skipping": (lambda t: t.skip_layer(1), U, r"t.layers\[5\].output = t.layers\[5\].input"),
    "nnsight's steps": (lambda t: t.iter[2], U, r"t.generated\[n - 1\]"),
    "an output projection": (lambda t: t.layers[1].self_attn.o_proj.input, U, r"t.layers\[5\].attn.z"),
    "a down projection": (lambda t: t.layers[1].mlp.down_proj.input, U, "t.layers\\[5\\].mlp.neurons"),
    "one module as a list": (lambda t: loop(t.layers[1].mlp), E, "<layer 1.mlp> is one module"),
    "tokens of everything": (lambda t: t.all()[0], E, r"\.layers\[5\].output\[0\]"),
    "a trace's token": (lambda t: t[0], E, r"t.layers\[5\].output\[0\]"),
    "a tuple of outputs": (lambda t: t.layers[1].outputs, E, ".output is the tensor itself"),
    "probabilities": (lambda t: t.next_token_probs, U, "take their softmax"),
    "a site without its layer": (lambda t: t.resid_mid.save(), E, r"resid_mid\[5\].save"),
    "several layers read": (lambda t: t.layers[0:2].output.save(), E, r"one layer at a time.*t.cache"),
    # what does not fit
    "a vector too short": (lambda t: put(t.layers[1].output, -1, V[:3]), S, r"width 16, got shape \[3\]"),
    "a head's vector too long": (lambda t: put(t.layers[1].attn.z[0], -1, V), S, r"width 8, got shape \[16\]"),
    "too few rows": (lambda t: put(t.layers[1].output, slice(0, 3), torch.ones(2, 16)), S, r"\(3\), got 2"),
    "a batch of two": (lambda t: put(t.layers_output[1], slice(None), torch.ones(2, 6, 16)), S, "width 16, .*\\[2, 6, 16\\]"),
    "rows for tokens to come": (lambda t: put(t.layers[1].output, pc.token(3), torch.ones(2, 16)), K, "selects no position"),
    # the order of things
    "backwards in depth": (lambda t: put(t.layers[1].output, -1, t.layers[2].output[-1]), E, "is computed before .*cannot use"),
    "backwards in a layer": (lambda t: put(t.layers[1].attn.output, -1, t.layers[1].mlp.output[-1]), E, "is computed before"),
    "the last layer's output into layers": (lambda t: put(t.layers[0:3].output, -1, t.layers[1].mid[-1]), E, "is computed before"),
    "a clone changed and saved": (lambda t: (h := t.embed.clone(), put(h, -1, 0), h.save()), E, "only be written into the model"),
    "a sum that is indexed": (lambda t: (t.embed + t.resid_mid[1])[-1], E, "index before computing"),
    # assignment to what is no tensor
    "a layer replaced": (lambda t: put(t.layers, 1, V), E, r"t.layers\[1\].output = value"),
    "a module replaced": (lambda t: setattr(t.layers[1], "mlp", V), E, r".mlp.output = value"),
    "a name set": (lambda t: setattr(t, "steering", V), E, "'steering' cannot be set in a trace"),
    "an attribute of a tensor set": (lambda t: setattr(t.layers[1].output, "data", V), E, "cannot set 'data'"),
    "a second prompt": (lambda t: t.invoke(COLOSSEUM), E, "already has a prompt"),
}  # fmt: skip


@pytest.mark.parametrize("what", IN_A_LINE)
def test_a_wrong_line_raises_there(lm, no_run, what):
    line, kind, text = IN_A_LINE[what]
    with pytest.raises(kind, match=text) as raised, lm.trace(EIFFEL) as t:
        line(t)
        pytest.fail("it returned")
    assert type(raised.value) is kind
    assert "edits[" not in str(raised.value)  # it has no place in a program yet


@pytest.mark.parametrize("what", IN_A_LINE)
def test_a_wrong_line_that_is_caught_leaves_no_trace(lm, what):
    line, kind, _ = IN_A_LINE[what]
    with lm.trace(EIFFEL) as t:
        with pytest.raises(kind):
            line(t)
        t.layers[0].output.save()
    assert all(isinstance(op, pc.Capture) for op in t.run.program.edits)


def test_generated_values_of_the_same_run(lm, no_run):
    with (
        pytest.raises(E, match="depends on generated tokens.* may change"),
        lm.trace(EIFFEL, max_tokens=3) as t,
    ):
        t.generated[0].layers[2].output = t.generated[1].layers[1].output
    with pytest.raises(E, match="depends on generated tokens"), lm.trace(EIFFEL, max_tokens=3) as t:
        t.all().layers[1].output = t.all().layers[2].output


def test_how_many_are_generated(lm, no_run):
    with pytest.raises(E, match="unknown until they are generated"), lm.trace(EIFFEL, max_tokens=3) as t:
        t.generated.layers[1].output.shape  # noqa: B018
    with pytest.raises(S, match="depends on generated tokens"), lm.trace(EIFFEL, max_tokens=3) as t:
        t.layers[1].output[pc.token(3)] = torch.ones(2, 16)


def test_a_saved_value_that_is_referred_to_weakly(lm):
    with (
        pytest.raises(E, match=r"(?s)cannot fill in resid_post\[1\] @ prompt.*weakref.*# held"),
        lm.trace(EIFFEL) as t,
    ):
        fine, held = t.layers[0].output.save(), t.layers[1].output.save()  # held
        weak = weakref.ref(held)
    assert weak() is held
    assert fine.any()
    with pytest.raises(E, match="cannot fill in"):
        held.sum()


def test_code_for_a_server(lm, no_run, monkeypatch):
    monkeypatch.setattr(lm.engine, "remote", True)
    with pytest.raises(E, match="on a server: save the rows"), lm.trace(EIFFEL) as t:
        t.layers[1].output.apply(lambda h: h)


def test_a_cycle_between_prompts(lm, no_run):
    with pytest.raises(E, match="(?s)depends on itself.*# round") as raised, lm.trace() as t:
        a, b = t.invoke(EIFFEL), t.invoke(COLOSSEUM)
        a.layers[1].output[-1] = b.layers[1].output[-1]  # round
        b.layers[0].output[-1] = a.layers[2].output[-1]  # round
    assert type(raised.value) is E


@pytest.mark.parametrize(
    ("prompt", "kind", "text"),
    [
        ([EIFFEL, COLOSSEUM], E, "expected one prompt.*t.invoke"),
        ([[1, 2], [3]], E, "expected one prompt"),
        ([], E, "expected one prompt"),
        (5, E, "expected one prompt"),
        ([1, 99999], K, "(?s)99999"),
    ],
)
def test_prompts_that_are_none(lm, prompt, kind, text):
    with pytest.raises(kind, match=text), lm.trace(prompt):
        pass


def test_what_is_wrong_with_the_trace_itself(lm, no_run):
    with pytest.raises(E, match="this trace has no prompt: lm.trace"), lm.trace():
        pass
    with pytest.raises(E, match=r"a.layers"), lm.trace() as t:
        t.layers  # noqa: B018
    with pytest.raises(E, match=r"a.embed"), lm.trace() as t:
        t.embed = 0
    with pytest.raises(E, match="score= requires a prompt"):
        lm.trace(score=[1])
    with pytest.raises(E, match="sampling.n"):
        lm.trace(EIFFEL, sampling={"n": 2, "temperature": 1.0})
    with pytest.raises(E, match="sampling"):
        lm.trace(EIFFEL, sampling=[{}])
    with pytest.raises(E, match="only one prompt"), lm.trace(stream=True) as t:
        t.invoke(EIFFEL)
    with pytest.raises(E, match="max_tokens"), lm.trace(EIFFEL, max_tokens=0) as t:
        pass
    with pytest.raises(E, match="expected an op"):
        lm.trace(EIFFEL, edits=["calm"])
    with (
        pytest.raises(pc.MissingSource, match="unknown bank entry 'clam'"),
        lm.trace(EIFFEL, edits=[pc.Use("clam")]),
    ):
        pass
    with pytest.raises(U, match="t.cache"):
        lm.trace(EIFFEL, capture=[pc.embed])


def test_after_the_end(lm):
    with lm.trace(EIFFEL) as t:
        view, forgotten = t.layers[1].output, t.layers[1].output[-1]
        h = view.save()
    assert h.any()
    for late in (
        view.save,
        lambda: put(view, -1, 0),
        lambda: view + 1,
        lambda: t.cache(pc.embed),
        lambda: t.embed.save(),
    ):
        with pytest.raises(E, match="the trace has ended"):
            late()
    with pytest.raises(E, match="was not saved"):
        forgotten.norm()
    with pytest.raises(E, match="invokes belong inside"):
        t.invoke(EIFFEL)
    with pytest.raises(E, match="is one `with` block"), t:
        pass
    with pytest.raises(E, match="only a trace with stream=True"):
        list(t)
    with lm.trace(EIFFEL, stream=True) as t:
        saved = t.embed.save()
        cache = t.cache(pc.embed)
    for early in (saved.sum, lambda: bool(saved), lambda: saved[0], lambda: t.text, lambda: cache["embed"]):
        with pytest.raises(E, match="runs when it is iterated, `for part in t`"):
            early()
    for _ in t:
        for early in (saved.sum, lambda: cache["embed"]):
            with pytest.raises(E, match=r"t.so_far\(value\)"):
                early()
    assert saved.any()
    with pytest.raises(E, match="iterated once"):
        list(t)


def test_without_its_with(lm, no_run):
    for one, use in (
        (lm.trace(EIFFEL), lambda t: t.layers[1].output.save()),
        (lm.trace(EIFFEL), lambda t: put(t.layers[1].output, -1, 0)),
        (lm.trace(EIFFEL), lambda t: t.text),
        (lm.trace(), lambda t: t.invoke(EIFFEL)),
        (lm.edit("calm"), lambda e: put(e.layers[1].output, slice(None), 0)),
    ):
        with pytest.raises(E, match="`with lm.trace"):
            use(one)


def test_an_error_in_the_block_is_the_callers_and_nothing_runs(lm, no_run):
    with pytest.raises(ZeroDivisionError), lm.trace(EIFFEL) as t:
        h = t.layers[1].output.save()
        1 / 0  # noqa: B018
    with pytest.raises(pc.MissingSource, match="an error ended the trace"):
        h.sum()
    with pytest.raises(ZeroDivisionError), lm.trace() as t, t.invoke(EIFFEL) as a:
        a.embed *= 2
        1 / 0  # noqa: B018

    async def wrong():
        async with lm.trace(EIFFEL):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(wrong())


def test_reads_across_traces_need_no_run_and_have_none(lm):
    """A view of one trace means nothing in another: its saved tensor does."""
    with lm.trace(EIFFEL) as one:
        view, value = one.layers[1].output[-1], one.layers[1].output[-1].save()
    with pytest.raises(E, match="the trace has ended"), lm.trace(COLOSSEUM) as t:
        t.layers[1].output[-1] = view
    with lm.trace(COLOSSEUM) as t:
        t.layers[1].output[-1] = value
        patched = t.layers[1].output[-1].save()
    assert torch.equal(patched, value)
    with pytest.raises(E, match="another trace"), lm.trace(COLOSSEUM) as t, lm.trace(EIFFEL) as other:
        t.layers[1].output[-1] = other.layers[1].output[-1]


def test_what_never_came_is_an_error_at_its_line(lm):
    """The run may end early: what it did give is there, and what never came is no empty tensor."""
    run = lm.run(EIFFEL, max_tokens=60)
    assert len(run.token_ids) < 50
    with (
        pytest.raises(pc.MissingSource, match="(?s)ended after .*# late") as raised,
        lm.trace(EIFFEL, max_tokens=60) as t,
    ):
        h = t.layers[1].output.save()
        late = t.generated[50].layers[1].output.save()  # late
    assert h.any()
    with pytest.raises(pc.MissingSource, match="ended after"):
        late.sum()
    assert raised.value.path is None


def test_a_named_program(lm, no_run):
    for wrong, text in (
        (lambda e: e.layers[1].output.save(), "a named program cannot read"),
        (lambda e: put(e.layers[1].output, slice(None), e.layers[0].output), "a named program cannot read"),
        (lambda e: e.cache(pc.embed), "a named program cannot read"),
        (lambda e: e.layers[1].output.shape, "a named program cannot read"),
    ):
        with pytest.raises(E, match=text), lm.edit("wrong") as e:
            wrong(e)
        assert "wrong" not in lm.bank
    with pytest.raises(E, match="nothing was written"), lm.edit("empty"):
        pass
    with pytest.raises(E, match="200 characters"):
        lm.edit("")


def test_a_trace_takes_no_images(lm, no_run):
    with pytest.raises(E, match="images"):
        lm.trace({"prompt": EIFFEL, "multi_modal_data": {"image": object()}})


NOWHERE = pc.span("nope")
WITHOUT_EFFECT = {
    "zeros of another width": (lambda t: setattr(t.layers[1], "output", t.layers[1].output + torch.zeros(7)), S),
    "zeros in place": (lambda t: t.layers[1].output.__iadd__(torch.zeros(7)), S),
    "zeros of other rows": (lambda t: t.layers[1].output.__iadd__(torch.zeros(3, 16)), S),
    "zeros taken away": (lambda t: t.layers[1].output.__isub__(np.zeros(7)), S),
    "ones of another width": (lambda t: t.layers[1].output.__imul__(torch.ones(7)), S),
    "zeros into a clone": (lambda t: t.layers[1].output.clone().__iadd__(torch.zeros(7)), S),
    "zeros beside a read": (lambda t: setattr(t.layers[2], "output", t.layers[1].output + torch.zeros(7)), S),
    "a missing token times 1": (lambda t: t.layers[1].output[99].__imul__(1), K),
    "a missing token less 0": (lambda t: t.layers[1].output[99].__isub__(0), K),
    "a missing span times 1": (lambda t: t.layers[1].output[NOWHERE].__imul__(1), K),
    "a missing span plus 0": (lambda t: t.layers[1].output[NOWHERE].__iadd__(0), K),
    "a missing span divided by 1": (lambda t: t.layers[1].output[NOWHERE].__itruediv__(1), K),
    "a missing span as itself": (lambda t: put(t.layers[1].output, NOWHERE, t.layers[1].output[NOWHERE]), K),
    "no layer": (lambda t: t.layers[None], E),
    "no layer of a site": (lambda t: t.resid_mid[None], E),
    "no layer of nnterp's": (lambda t: t.layers_output[None], E),
    "no head": (lambda t: t.z[1, None], E),
    "a layer that is true": (lambda t: t.layers[True], E),
}


@pytest.mark.parametrize("what", WITHOUT_EFFECT)
def test_a_write_without_effect_is_checked(lm, no_run, what):
    line, kind = WITHOUT_EFFECT[what]
    with pytest.raises(kind), lm.trace(EIFFEL) as t:
        line(t)


NEUTRAL = {
    "scale": lambda at, **to: pc.Scale(1.0, at, **to), "add": lambda at, **to: pc.Add(np.ones(16), at, scale=0.0, **to),
    "zeros": lambda at, **to: pc.Add(np.zeros(16), at, **to), "alpha": lambda at, **to: pc.Replace(V, at, alpha=0, **to),
    "mask": lambda at, **to: pc.Replace(V, at, mask=np.zeros(16), **to), "noise": lambda at, **to: pc.Noise(0.0, at, **to),
}  # fmt: skip


@pytest.mark.parametrize("kind", NEUTRAL)
def test_an_op_without_effect_is_checked_and_changes_nothing(lm, kind):
    make = NEUTRAL[kind]
    with pytest.raises(K) as missing:
        lm.run(EIFFEL, edits=[make("resid_post[1]", tokens=NOWHERE)])
    assert missing.value.path == "edits[0].tokens"
    with pytest.raises(pc.PatchclampError) as beyond:
        lm.run(EIFFEL, edits=[make("resid_post[99]")])
    assert beyond.value.path == "edits[0].at"
    plain, edited = (lm.run(EIFFEL, edits=edits, capture="logits") for edits in ((), [make("resid_post[1]")]))
    assert np.array_equal(plain["logits"], edited["logits"])


@pytest.mark.parametrize("value", [np.zeros(7), np.zeros((3, 16))])
def test_zeros_of_a_wrong_shape_are_refused(lm, value):
    with pytest.raises(S) as error:
        lm.run(EIFFEL, edits=[pc.Add(value, "resid_post[1]", scale=0.0)])
    assert error.value.path == "edits[0].value"


def test_numpys_arithmetic_is_a_traces_own(lm):
    a = np.arange(16, dtype=np.float32)
    with lm.trace(EIFFEL) as t:
        read = t.layers[1].output
        saved = [(a * read).save(), (a - read).save(), np.add(read, a).save(), (read * np.float32(2)).save()]
        plain = read.save()
    for value, expected in zip(saved, (plain * a, -plain + a, plain + a, plain * 2), strict=True):
        assert torch.equal(value, torch.as_tensor(expected))


MISUSED = {
    "NumPy's mean": lambda t: np.mean(t.embed), "NumPy's exp": lambda t: np.exp(t.embed), "max": lambda t: np.maximum(t.embed, 0),
    "NumPy's concatenate": lambda t: np.concatenate([t.embed, t.embed]), "NumPy's product": lambda t: np.eye(16) @ t.embed,
    "NumPy's norm": lambda t: np.linalg.norm(t.embed), "where": lambda t: np.where(True, t.embed, 0),
    "a saved value in NumPy": lambda t: np.exp(t.embed.save()), "into an array": lambda t: np.zeros(16).__iadd__(t.embed),
    "a block of all tokens": lambda t: t.all().__enter__(), "a call": lambda t: t.layers[1].output(),
    "layers called": lambda t: t.layers(1), "steps called": lambda t: t.generated(), "all layers": lambda t: t.layers.output,
    "a module plus 1": lambda t: t.layers[1] + 1, "a table times 2": lambda t: t.resid_mid * 2, "a trace plus 1": lambda t: t + 1,
    "modules in a list": lambda t: torch.cat([t.layers[1], t.layers[1]]),
    "a module in torch": lambda t: torch.add(t.layers[1], 1), "a module in NumPy": lambda t: np.add(t.layers[1].mlp, 1),
    "two shapes": lambda t: t.embed + torch.zeros(7) + torch.zeros(5), "a sum's shape": lambda t: (t.embed + torch.zeros(7)).save(),
}  # fmt: skip


@pytest.mark.parametrize("what", MISUSED)
def test_a_proxy_that_is_misused(lm, what):
    with pytest.raises(pc.ProgramError), lm.trace(EIFFEL) as t:
        MISUSED[what](t)


def test_blocks_that_are_none(lm, no_run):
    with pytest.raises(E, match="t.all"), lm.trace(EIFFEL) as t, t.all():
        pass
    with pytest.raises(E, match="t.all"), lm.trace(EIFFEL) as t, t.generated:
        pass


@pytest.mark.parametrize(
    ("options", "path", "instead"),
    [({"max_new_tokens": 3}, "max_new_tokens", "max_tokens="), ({"temperature": 1}, "temperature", "sampling="),
     ({"max_tokns": 3}, "max_tokns", "max_tokens"), ({"remote": True}, "remote", "omit it"),
     ({"max_tokens": True}, "max_tokens", "token"), ({"score": 5}, "score", "list"), ({"score": "ab"}, "score", "one token"),
     ({"sampling": {1: 2}}, "sampling", "names"), ({"edits": 5}, "edits[0]", "op")],
)  # fmt: skip
def test_arguments_that_are_wrong(lm, no_run, options, path, instead):
    with pytest.raises(pc.PatchclampError, match=instead) as error:
        lm.trace(EIFFEL, **options)
    assert error.value.path == path


@pytest.mark.parametrize("prompt", [[1.7], [10**9], b"x", 5, [True], {"a": 1}])
def test_prompts_of_another_kind(lm, no_run, prompt):
    with pytest.raises(pc.PatchclampError) as error:
        lm.trace(prompt)
    assert error.value.path == "prompt"


@pytest.mark.parametrize("messages", [5, "hello", [5], [[{"role": "user", "content": "a"}]]])
def test_chats_of_another_kind(lm, no_run, messages):
    with pytest.raises(pc.ProgramError):
        lm.trace(messages=messages)


def test_what_a_model_has_elsewhere(lm):
    for name in ("generate", "forward", "run_with_cache", "to_tokens"):
        with pytest.raises(AttributeError, match=r"lm\."):
            getattr(lm, name)
    assert not hasattr(lm, "no_such_name")


NOT_NUMBERS = {
    "a masked array": np.ma.masked_array(np.ones(16), mask=[1] * 16), "a list of masked arrays": [np.ma.masked_array(np.ones(16), mask=[1] * 16)],
    "masked": np.ma.masked, "True": True, "NumPy's True": np.True_, "torch's True": torch.tensor(True),
    "booleans": [True] * 16, "a boolean array": np.ones(16, bool), "a boolean tensor": torch.ones(16) > 0,
    "a boolean of NumPy in a list": [np.True_, *[1.0] * 15], "boolean arrays in a list": [np.array(True)] * 16,
    "boolean tensors in a list": [torch.tensor(True)] * 16, "bytes in a list": [bytearray(b"a")] * 16,
    "a duration": np.timedelta64(1, "s"), "dates": np.ones(16, "M8[s]"), "durations in a list": [np.timedelta64(1, "s")] * 16,
    "objects": np.array([1.0] * 16, object), "complex": [np.complex64(1)] * 16, "a ragged list": [[1.0], [1.0, 2.0]],
    "sparse": torch.ones(16).to_sparse(), "meta": torch.ones(16, device="meta"), "meta 0-d": torch.ones((), device="meta"),
    "quantised": torch.quantize_per_tensor(torch.ones(16), 1.0, 0, torch.qint8),
    "quantised 0-d": torch.quantize_per_tensor(torch.tensor(1.0), 1.0, 0, torch.qint8),
    "nested": torch.nested.nested_tensor([torch.ones(16)]), "a set": {1.0}, "a mapping": {1: 2.0},
}  # fmt: skip
NUMBERS = {
    "a float": 2.0, "an int": 2, "NumPy's": np.float64(2), "torch's": torch.tensor(2.0), "a list": [2.0] * 16,
    "integers": np.full(16, 2), "bf16": torch.full((16,), 2.0, dtype=torch.bfloat16), "tensors in a list": [torch.tensor(2.0)] * 16,
    "NumPy's in a list": [np.float32(2)] * 16, "a vector": pc.Vector.of([2.0] * 16), "a gradient's": torch.full((16,), 2.0).requires_grad_(),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_NUMBERS)
def test_what_is_no_number_is_written_nowhere(lm, no_run, what):
    value = NOT_NUMBERS[what]
    for write in (
        lambda t: t.layers[1].output.__iadd__(value), lambda t: t.layers[1].output.__imul__(value),
        lambda t: put(t.layers[1].output, slice(None), value), lambda t: t.embed - value,
    ):  # fmt: skip
        with pytest.raises(E), lm.trace(EIFFEL) as t:
            write(t)
    for read in (pc.Vector.of, lambda value: pc.Scale(value, "resid_post[1]")):
        with pytest.raises(E):
            read(value)


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_of_every_kind_are_written(lm, what):
    with lm.trace(EIFFEL) as t:
        before = t.layers[1].output.save()
        t.layers[1].output += NUMBERS[what]
        after = t.layers[1].output.save()
        t.layers[2].output[:] = NUMBERS[what]
        put = t.layers[2].output.save()
    torch.testing.assert_close(after, before + 2)
    assert (put == 2).all()
