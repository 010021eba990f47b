"""The language: laws of its text forms, selections and fingerprints, and every error's text."""

import ast
import itertools
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import patchclamp as pc
from patchclamp import errors, language
from patchclamp.errors import TREE, pack, unpack
from patchclamp.language import SITES, SPECS, Range, TextSpan
from patchclamp.language.ops import FEATURE_MODES, OPS, as_capture, fuzz
from patchclamp.language.program import VECTORS, Program, to_dict
from patchclamp.language.site import DIFFERENCES, EDITED_ELSEWHERE, ELSEWHERE, NNTERP, TRANSFORMER_LENS, unmoved
from patchclamp.language.tokens import GROUPS, ImageTokens, Joined, Positions
from patchclamp.language.values import DTYPES, orthonormal
from patchclamp.plan import Prompt
from patchclamp.sites.tables import FAMILIES
from patchclamp.studies.inputs import edits_in, rows_of

ends = st.none() | st.integers(-40, 40)
ranges = st.builds(Range, ends, ends, st.none() | st.integers(1, 5)).filter(lambda made: made != Range())
indices = st.none() | st.integers(-40, 40) | ranges


@st.composite
def sites(draw) -> pc.Site:
    name = draw(st.sampled_from(sorted(SITES)))
    kind = SITES[name]
    layers = indices | st.lists(st.integers(-40, 40), min_size=1, max_size=4, unique=True).map(tuple)
    return pc.Site(name, draw(layers) if kind.layered else None, draw(indices) if kind.index else None)


@st.composite
def positions(draw) -> Positions:
    of = draw(st.sampled_from(GROUPS))
    low = -40 if of == "prompt" else 0
    end = st.none() | st.integers(low, 40)
    made = st.builds(Range, end, end, st.none() | st.integers(1, 5)).filter(lambda made: made != Range())
    lists = st.lists(st.integers(low, 40), min_size=1, max_size=5).map(tuple)
    return Positions(of, draw(st.none() | st.integers(low, 40) | lists | made))


texts = st.text(min_size=1) | st.text("\"'\\\n\r\t \x00\x7f\u2028é\U0001f600, )]", min_size=1)
spans = st.builds(TextSpan, texts, st.integers(-9, 9))
roles = st.builds(pc.role, texts, st.none() | st.integers(-9, 9))
images = st.just(pc.image) | st.builds(lambda n: pc.image[n], st.integers(-9, 9))
image_keys = st.integers(-9, 9) | ranges | st.lists(st.integers(-9, 9), min_size=1, max_size=3).map(tuple)
selections = st.recursive(
    positions()
    | spans
    | roles
    | st.builds(lambda a, key: a[key], roles, st.integers(-9, 9))
    | images
    | st.builds(ImageTokens, st.integers(-9, 9), image_keys)
    | st.builds(pc.between, texts | st.integers(0, 9), texts.map(lambda text: text + ".") | st.integers(10, 99))
    | st.builds(pc.token, st.integers(0, 99), st.integers(0, (1 << 24) - 1)),
    lambda inner: st.builds(Joined, st.sampled_from(["|", "&", "-"]), inner, inner),
    max_leaves=5,
)
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
factors = st.floats(-3e38, 3e38)


@st.composite
def vectors(draw) -> pc.Vector:
    shape = draw(st.tuples(st.integers(1, 4)) | st.tuples(st.integers(1, 3), st.integers(1, 4)))
    size = int(np.prod(shape))
    return pc.Vector.of(np.array(draw(st.lists(numbers, min_size=size, max_size=size)), np.float32).reshape(shape))


froms = st.builds(pc.From, st.text("0123456789abcdef", min_size=1), st.none() | sites(), st.none() | selections)
names = st.builds(pc.Named, st.text(min_size=1, max_size=20))
values = vectors() | froms | names
rows = vectors().map(lambda given: pc.Vector.of(given.rows()[0]))


def has_directions(given: pc.Vector) -> bool:
    return bool(given.array().any(axis=-1).all())


planes = names | st.just(pc.Vector.of([[1.0, 0.0, 2.0], [0.0, 3.0, 0.5]]))
captures = st.builds(pc.Capture, sites(), selections, st.sampled_from(DTYPES), st.none() | vectors() | names)
ops = (
    captures
    | st.builds(pc.Add, values, sites(), selections, factors, st.none() | st.just("match"))
    | st.builds(pc.Replace, values, sites(), selections, factors)
    | st.builds(pc.Zero, sites(), selections)
    | st.builds(pc.Mean, values, sites(), selections)
    | st.builds(pc.Use, st.text(min_size=1, max_size=20), factors, st.none() | selections)
    | st.builds(pc.Replace, values, sites(), selections, factors, rows)
    | st.builds(pc.Scale, factors, sites(), selections)
    | st.builds(pc.Scale, factors, st.just(pc.pattern[0:2, 1]), selections, st.none() | selections)
    | st.builds(pc.Knockout, selections, st.just(pc.pattern[3]), selections)
    | st.builds(pc.Replace, vectors(), st.just(pc.pattern[3, 0]), selections, factors)
    | st.builds(pc.Ablate, vectors().filter(has_directions), sites(), selections)
    | st.builds(
        pc.Clamp, rows.filter(has_directions), sites(), selections, st.floats(-9, 0), st.none() | st.floats(0, 9)
    )
    | st.builds(pc.Rotate, planes, factors, sites(), selections, st.booleans())
    | st.builds(pc.Replace, values, sites(), selections, factors, basis=vectors().filter(has_directions))
    | st.builds(pc.LowRank, vectors() | names, st.none() | rows, vectors() | names, sites(), selections)
    | st.builds(pc.SetFeature, st.just("a"), st.just([3, 1]), factors, selections, st.sampled_from(FEATURE_MODES))
    | st.builds(pc.Features, st.just("a"), selections, st.none() | st.integers(1, 128))
    | st.builds(pc.Reconstruct, st.just("a"), selections)
    | st.builds(pc.Noise, st.floats(0, 9), sites(), selections, st.integers(0, (1 << 63) - 1), st.booleans())
)
programs = st.builds(Program, st.lists(ops, max_size=4).map(tuple), st.lists(captures, max_size=3).map(tuple))


# -- laws


@pytest.mark.parametrize(("text", "terms"), [
    ("calm", [("calm", 1.0, None)]), ("- 2 * calm+.5 b.c-d", [("calm", -2.0, None), ("b.c-d", 0.5, None)]),
    (" 1e-1 calm - honest @ generated[0:8] - prompt ",
     [("calm", 0.1, pc.generated[0:8] - pc.prompt), ("honest", -1.0, pc.generated[0:8] - pc.prompt)]),
])  # fmt: skip
def test_the_short_form_of_a_mix(text, terms):
    assert pc.Program.parse(text) == Program(tuple(pc.Use(*term) for term in terms))


@pytest.mark.parametrize(
    "text", [each * 1_000_000 + end for each, end in (("1", ""), (".", ""), (" ", "!"), ("a", "!"), ("1 e", "+"))]
)
def test_a_long_mix_is_read_in_linear_time(text):
    """It may be the model's name in a request. In quadratic time these texts would take hours."""
    with pytest.raises(pc.ProgramError):
        pc.Program.parse(text)


@given(sites())
def test_a_site_reads_back_from_its_text(made):
    assert pc.site(str(made)) == made
    assert pc.site(f"  {made} ") == made
    assert hash(pc.site(str(made))) == hash(made)
    assert repr(made) == f"pc.{made}"


@given(selections)
def test_tokens_read_back_from_their_text(made):
    assert pc.tokens(str(made)) == made
    assert pc.tokens(made) is made
    assert "\n" not in str(made)


@given(sites(), selections)
def test_a_site_at_tokens_reads_back_from_its_text(site, tokens):
    assert as_capture(str(site @ tokens)) == as_capture(site @ tokens) == pc.Capture(site, tokens)


@given(st.text(max_size=30) | st.text("[]():,-@\"'\\ 0123456789szpan", max_size=30))
def test_any_text_is_read_or_refused(text):
    for read in (pc.site, pc.tokens, as_capture, Program.from_json):
        try:
            made = read(text)
        except pc.PatchclampError:
            continue
        assert read(made.to_json() if isinstance(made, Program) else str(made.at) if read is as_capture else str(made))


def test_the_json_form_reads_every_field_that_holds_vectors():
    types = {name: kind for op in OPS.values() for name, kind in op.__annotations__.items() if op is not pc.SetFeature}
    assert {name for name, kind in types.items() if "Vector" in str(kind) or str(kind) == "Value"} == VECTORS


@given(programs)
def test_a_program_reads_back_from_its_json(program):
    again = Program.from_json(program.to_json())
    assert again == program
    assert hash(again) == hash(program)
    assert again.fingerprint == program.fingerprint
    assert json.loads(program.to_json()) == json.loads(again.to_json())
    assert bool(program) == (len(list(program.ops)) > 0)


@given(programs, programs)
def test_content_and_fingerprint_differ_together(one, other):
    assert (one.fingerprint == other.fingerprint) == (to_dict(one) == to_dict(other))


@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([
        "edits", "capture", "add", "embed", "prompt", "vector", "from", "type", "at", "value", "tokens", "run",
    ]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["edits", "capture", "type", "at", "tokens", "value", "scale", "shape", "data", "run", "site"]),
        inner, max_size=4,
    ), max_leaves=20,
).map(lambda data: json.dumps(data).encode()))  # fmt: skip
def test_any_bytes_are_a_program_or_refused(data):
    try:
        program = Program.from_json(data)
    except pc.PatchclampError:
        return
    assert Program.from_json(program.to_json()) == program


@given(positions(), st.integers(1, 20), st.integers(0, 20), st.integers(1, 7))
def test_a_selection_does_not_depend_on_chunks(tokens, prompt, generated, chunk):
    limit = prompt + generated
    first, length = {"prompt": (0, prompt), "generated": (prompt, generated), "every": (0, limit)}[tokens.of]
    index = tokens.index

    def holds(position: int) -> bool:
        i = position - first
        if not 0 <= i < length:
            return False
        if isinstance(index, int):
            return i in (index, index + length)
        if isinstance(index, tuple):
            return i in index or i - length in index
        if index is None:
            return True
        start, stop = (e if e is None or e >= 0 else max(e + length, 0) for e in (index.start, index.stop))
        start, step = start or 0, index.step or 1
        return i >= start and (stop is None or i < stop) and (i - start) % step == 0

    numbered = index if isinstance(index, tuple) else (index,) if isinstance(index, int) else ()
    if any(not -length <= number < length for number in numbered):
        with pytest.raises(pc.TokensError, match="out of range"):
            tokens.select(prompt, limit)
        return
    resolved = [number % length for number in numbered]
    if len(set(resolved)) < len(resolved):
        with pytest.raises(pc.TokensError, match="duplicate"):
            tokens.select(prompt, limit)
        return
    chunks = [range(begin, min(begin + chunk, limit)) for begin in range(0, limit, chunk)]
    by_chunk = [position for part in chunks for position in part if holds(position)]
    chosen = list(tokens.select(prompt, limit))
    assert sorted(chosen) == by_chunk
    assert not isinstance(index, tuple) or chosen == [first + number for number in resolved], "a list keeps its order"


@given(st.text("ab ", min_size=1, max_size=12), st.text("ab", min_size=1, max_size=3), st.integers(-4, 4), st.data())
def test_a_span_selects_the_tokens_it_touches(prompt, text, occurrence, data):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(prompt)))) | {0, len(prompt)})
    offsets = [(0, 0), *itertools.pairwise(cuts)]
    starts = [i for i in range(len(prompt)) if prompt.startswith(text, i)]
    span = pc.span(text, occurrence)
    if not -len(starts) <= occurrence < len(starts):
        with pytest.raises(pc.TokensError):
            span.find(offsets, prompt)
        return
    characters = set(range(starts[occurrence], starts[occurrence] + len(text)))
    touched = [i for i, (begin, end) in enumerate(offsets) if characters & set(range(begin, end))]
    assert span.find(offsets, prompt) == touched
    assert touched


# -- what is the same and what is not


def test_the_same_said_differently_is_equal():
    v, site, tokens, kept = [0.5, -1.0], pc.resid_post[3], pc.prompt[-1], "z[1, 2] @ generated[0:8]"
    said = [
        Program.of(pc.Add(v, at=site, tokens=tokens, scale=2), pc.z[1, 2] @ pc.generated[0:8]),
        Program.of([pc.Add(np.array(v), "resid_post[3]", "prompt[-1]", np.float32(2.0))], [kept]),
        Program.of((pc.Add(pc.Vector.of(v), at=site @ tokens, scale=2.0),), pc.Capture("z[1, 2]", "generated[0:8]")),
        Program.of(pc.Add(v, "blocks.3.hook_resid_post", " prompt[ -1 ] ", np.float32(2)), "z[ 1,2 ]@generated[ 0:8 ]"),
        Program.from_json(
            '{"capture": [{"tokens": "generated[0:8]", "type": "capture", "at": "z[1, 2]"}], "edits": [{"type": "add",'
            ' "at": "resid_post[3]", "scale": 2, "tokens": "prompt[-1]", "value": [0.5, -1]}]}'
        ),
    ]
    assert len({program.fingerprint for program in said}) == 1
    assert len(set(said)) == 1


def test_what_differs_differs():
    add = {"value": [1.0, 2.0], "at": "resid_post[3]", "tokens": "prompt[0:3]", "scale": 2.0}
    changes = [
        {}, {"value": [1.0, 2.5]}, {"value": [[1.0, 2.0]]}, {"value": pc.From("a")}, {"value": pc.From("b")},
        {"value": pc.From("a", "resid_pre[3]")}, {"value": pc.From("a", position=1)}, {"at": "resid_post[4]"},
        {"at": "resid_pre[3]"}, {"at": "resid_post[3:4]"}, {"tokens": "every[0:3]"}, {"tokens": "prompt[0:2]"},
        {"tokens": "prompt[0, 1, 2]"}, {"scale": -2.0},
    ]  # fmt: skip
    said = [Program.of(pc.Add(**(add | change))) for change in changes]
    said += [
        Program.of(pc.Replace(add["value"], add["at"], add["tokens"], 2.0)),
        Program.of(pc.Zero(add["at"], add["tokens"])),
    ]
    said += [
        Program.of((), "embed"),
        Program.of(pc.Capture("embed")),
        Program.of((), pc.Capture("embed", dtype="bfloat16")),
        *(Program.of((), pc.Capture("embed", project=w)) for w in ([1.0, 2.0], [1.0, 2.5], [[1.0, 2.0]], "probes")),
    ]
    said += [
        Program.of([pc.Zero("embed"), pc.Zero("final_norm")]),
        Program.of([pc.Zero("final_norm"), pc.Zero("embed")]),
        Program(),
    ]
    assert len({program.fingerprint for program in said}) == len(said)
    assert len(set(said)) == len(said)


def test_every_layer_is_no_layer_and_whole_ranges_are_none():
    assert pc.resid_post[:] == pc.resid_post == pc.resid_post[Range()] == pc.site("resid_post[:]")
    assert pc.z[:, 3] == pc.Site("z", None, 3) == pc.site("z[:, 3]")
    assert str(pc.z[:, 3]) == "z[:, 3]"
    assert pc.prompt[:] == pc.prompt
    assert str(pc.resid_post[8:12]) == "resid_post[8:12]"
    assert str(pc.z[5, 3] @ pc.prompt[-1]) == "z[5, 3] @ prompt[-1]"


def test_tokens_from_numbers():
    assert pc.tokens(3) == pc.every[3]
    assert pc.tokens([0, 2]) == pc.tokens((0, 2)) == pc.every[0, 2]
    assert pc.tokens(range(2, 8, 3)) == pc.every[2:8:3]
    assert pc.prompt[np.int64(2)] == pc.prompt[2]
    assert list(pc.prompt[-1, 0].select(5, 9)) == [4, 0]
    assert list(pc.generated.select(5, 9)) == [5, 6, 7, 8]
    assert list(pc.prompt[2:99].select(5, 9)) == [2, 3, 4]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("span('it\"s')", 'it"s'), (r"span('it\'s')", "it's"), (r"span('a\"b')", 'a"b'), ('span("a\nb")', "a\nb"),
        (r'span("a\nb\\")', "a\nb\\"), (r"span('\\')", "\\"), (r'span("\u00e9")', "é"),
    ],
)  # fmt: skip
def test_spans_in_either_quotes(text, meant):
    assert pc.tokens(text) == pc.span(meant)


def test_spans_print_as_they_are_written():
    assert str(pc.span("Tour É")) == 'span("Tour É")'
    assert str(pc.span('"a"\n', -2)) == 'span("\\"a\\"\\n", -2)'


def test_vectors_keep_their_numbers():
    import torch

    rows = np.arange(6, dtype=np.float64).reshape(2, 3)
    made = pc.Vector.of(rows)
    assert made == pc.Vector.of(rows.tolist()) == pc.Vector.of(torch.tensor(rows, dtype=torch.bfloat16))
    assert made.shape == (2, 3)
    assert made.array().tolist() == rows.tolist()
    assert made.rows().shape == (2, 3)
    assert pc.Vector.of(rows[0]).rows().shape == (1, 3)
    assert made.content != pc.Vector.of(rows.reshape(3, 2)).content
    assert repr(made) == f"Vector(2x3 {made.content[:8]})"
    assert not made.array().flags.writeable


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("hook_embed", "embed"), ("blocks.7.hook_resid_pre", "resid_pre[7]"), ("blocks.7.hook_resid_mid", "resid_mid[7]"),
        ("blocks.7.hook_resid_post", "resid_post[7]"), ("blocks.7.hook_attn_out", "attn_out[7]"),
        ("blocks.7.hook_mlp_out", "mlp_out[7]"), ("blocks.7.attn.hook_q", "q[7]"),
        ("blocks.7.attn.hook_k", "k[7]"), ("blocks.7.attn.hook_v", "v[7]"), ("blocks.12.attn.hook_z", "z[12]"),
        ("blocks.0.mlp.hook_post", "neurons[0]"),
        ("embed.hook_out", "embed"), ("blocks.7.hook_in", "resid_pre[7]"), ("blocks.7.hook_out", "resid_post[7]"),
        ("blocks.7.ln1.hook_out", "attn_in[7]"), ("blocks.7.ln2.hook_out", "mlp_in[7]"),
        ("ln_final.hook_out", "final_norm"),
    ],
)  # fmt: skip
def test_transformer_lens_names(alias, name):
    assert pc.site(alias) == pc.site(f" {alias} ") == pc.site(name)
    assert str(pc.site(alias)) == name
    assert Program.of((), f"{alias} @ prompt[-1]").capture[0] == pc.Capture(name, "prompt[-1]")


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("token_embeddings", "embed"), ("layers_input[0]", "resid_pre[0]"), ("layers_output[12]", "resid_post[12]"),
        ("layers_output[3:5]", "resid_post[3:5]"), ("layers_output", "resid_post"), ("layers_output[-1]", "resid_post[-1]"),
        ("attentions_input[::2]", "attn_in[::2]"), ("attentions_output[ 4 ]", "attn_out[4]"), ("mlps_input[4]", "mlp_in[4]"),
        ("mlps_output[4:]", "mlp_out[4:]"), ("ln_final", "final_norm"), ("logits", "logits"),
    ],
)  # fmt: skip
def test_nnterp_names(alias, name):
    assert pc.site(alias) == pc.site(f" {alias} ") == pc.site(name)
    assert str(pc.site(alias)) == name
    assert Program.of((), f"{alias} @ prompt[-1]").capture[0] == pc.Capture(name, "prompt[-1]")
    assert Program.of(pc.Zero(alias)).fingerprint == Program.of(pc.Zero(name)).fingerprint
    assert pc.From("a", alias) == pc.From("a", name)


@pytest.mark.parametrize(("sites", "count"), [(TRANSFORMER_LENS, 19), (NNTERP, 9)])
def test_every_alias_names_a_site_and_takes_what_it_takes(sites, count):
    assert len(sites) == count
    for alias, name in sites.items():
        layered = "{l}" in alias or (sites is NNTERP and SPECS[name].layered)
        assert layered == SPECS[name].layered
        assert alias not in ELSEWHERE
        written = alias.format(l=3) if "{l}" in alias or not layered else f"{alias}[3]"
        assert pc.site(written) == pc.Site(name, 3 if layered else None)


def test_differences_are_of_aliases_and_families_that_there_are():
    for difference in DIFFERENCES:
        assert set(difference.aliases) <= TRANSFORMER_LENS.keys() | NNTERP.keys()
        assert set(difference.families) <= {family.name for family in FAMILIES}


def test_at_carries_tokens_into_any_op():
    assert pc.Zero(pc.embed @ pc.prompt[0]) == pc.Zero("embed", "prompt[0]")
    assert pc.Add([1.0], pc.embed @ "prompt[0]") == pc.Add([1.0], "embed", tokens=pc.prompt[0])


# -- errors: what was asked, what is there, what was perhaps meant, and where


class Keyed:
    key = "abc"


def read(op: dict) -> Program:
    return Program.from_json(json.dumps({"edits": [{"type": "zero", "at": "embed"}, op]}))


def doubled(selection, times: int):
    """A selection joined with itself again and again: few objects, and more leaves than anybody could walk."""
    for _ in range(times):
        selection = selection | selection
    return selection


ERRORS = [
    # sites
    (lambda: pc.site("resid_pots[3]"), pc.UnknownName, None, "'resid_post'"),
    (lambda: pc.Site("hidden"), pc.UnknownName, None, "'hidden'"),
    (lambda: pc.site("z[1, 2, 3]"), pc.ProgramError, None, "'z[1, 2, 3]'"),
    (lambda: pc.z[1, 2, 3], pc.ProgramError, None, "got 3"),
    (lambda: pc.z[1][2], pc.ProgramError, None, "z[1]"),
    (lambda: pc.embed[0], pc.ProgramError, None, "'embed'"),
    (lambda: pc.site("logits[0]"), pc.ProgramError, None, "'logits'"),
    (lambda: pc.resid_post[1, 2], pc.ProgramError, None, "resid_post"),
    (lambda: pc.resid_post[1.0], pc.ProgramError, None, "1.0"),
    (lambda: pc.Site("resid_post", "1"), pc.ProgramError, None, "'1'"),
    (lambda: pc.site("resid_post[x]"), pc.ProgramError, None, "'x'"),
    (lambda: pc.site("resid_post[1"), pc.ProgramError, None, "'resid_post[1'"),
    (lambda: pc.site("blocks.7.ln1.hook_normalized"), pc.UnknownName, None, "attn_in[7]"),
    (lambda: pc.site(" ln_final.hook_normalized"), pc.UnknownName, None, "final_norm"),
    (lambda: pc.Zero("blocks.0.attn.hook_rot_k"), pc.UnknownName, "at", "k[0]"),
    (lambda: pc.site("attention_probabilities[3]"), pc.UnknownName, None, "attn_scores"),
    (lambda: pc.Zero("blocks.1.attn.hook_pattern"), pc.UnsupportedSite, "at", "Zero"),
    (lambda: pc.Probe([1.0], pc.pattern[1], name="p"), pc.UnsupportedSite, "at", "Probe"),
    (lambda: pc.Capture(pc.z[1], top=3), pc.ProgramError, "top", "z[1]"),
    (lambda: pc.Capture(pc.pattern, keys="prompt", top=3), pc.ProgramError, "top", "keys"),
    (lambda: pc.Capture(pc.pattern[1], pool="mean"), pc.ProgramError, "pool", "pool"),
    (lambda: pc.Capture(pc.attn_scores[1], spans=["prompt"]), pc.ProgramError, "spans", "attn_scores[1]"),
    (lambda: pc.site("mlps[2]"), pc.UnknownName, None, "mlps_output"),
    (lambda: pc.site("mlps_output[1, 2]"), pc.ProgramError, None, "mlp_out"),
    (lambda: pc.site(3), pc.ProgramError, None, "int 3"),
    (lambda: pc.resid_post[8:4:-1], pc.ProgramError, None, "-1"),
    # tokens
    (lambda: pc.tokens("promt[-1]"), pc.UnknownName, None, "'prompt'"),
    (lambda: pc.tokens("prompt[-1"), pc.ProgramError, None, "'prompt[-1'"),
    (lambda: pc.tokens(1.5), pc.ProgramError, None, "float 1.5"),
    (lambda: pc.tokens("prompt[1, 2:3]"), pc.ProgramError, None, "'prompt[1, 2:3]'"),
    (lambda: pc.prompt[[]], pc.TokensError, None, "prompt[()]"),
    (lambda: pc.prompt[[1.5]], pc.ProgramError, None, "1.5"),
    (lambda: pc.prompt[1.5], pc.ProgramError, None, "1.5"),
    (lambda: pc.prompt[1][2], pc.ProgramError, None, "prompt[1]"),
    (lambda: pc.generated[-1], pc.TokensError, None, "generated[-1]"),
    (lambda: pc.tokens("generated[2:-1]"), pc.TokensError, None, "generated[2:-1]"),
    (lambda: pc.every[0, -2], pc.TokensError, None, "every[0, -2]"),
    (lambda: pc.span(""), pc.TokensError, None, "span('')"),
    (lambda: pc.role(""), pc.ProgramError, None, "''"),
    (lambda: pc.role("user")[()], pc.TokensError, None, 'role("user")[()]'),
    (lambda: pc.role("user")[1][2], pc.ProgramError, None, 'role("user")[1]'),
    (lambda: pc.tokens('role("user")[0:1, 2]'), pc.ProgramError, None, "'role(\"user\")[0:1, 2]'"),
    (lambda: pc.role("tool").find([("user", [1])]), pc.TokensError, None, "user"),
    (lambda: pc.role("user", 1).find([("user", [1])]), pc.TokensError, None, 'role("user", 1)'),
    (lambda: pc.role("user")[3].find([("user", [1, 2])]), pc.TokensError, None, 'role("user")[3]'),
    (lambda: pc.Program.parse("0.3 calm 0.2 b"), pc.ProgramError, None, "character 9"),
    (lambda: pc.Program.parse("0.3 calm - + b"), pc.ProgramError, None, "character 11"),
    (lambda: pc.Program.parse("0.3 9b"), pc.ProgramError, None, "character 4"),
    (lambda: pc.Program.parse(" "), pc.ProgramError, None, "character 1"),
    (lambda: pc.Program.parse("calm @ nowhere"), pc.UnknownName, "tokens", "'nowhere'"),
    (lambda: pc.between(5, 5), pc.TokensError, "closing", "between(5, 5)"),
    (lambda: pc.between("", 5), pc.TokensError, "opening", "span('')"),
    (lambda: pc.image[0:2], pc.ProgramError, None, "image[1]"),
    (lambda: pc.tokens("image[0:2]"), pc.ProgramError, None, "'image[0:2]'"),
    (lambda: pc.image[0][1][2], pc.ProgramError, None, "image[0][1]"),
    (lambda: pc.image[0][()], pc.TokensError, None, "image[0][()]"),
    (lambda: pc.image.find([]), pc.TokensError, None, '"multi_modal_data"'),
    (lambda: pc.image[-2].find([[3, 4]]), pc.TokensError, None, "image[-2]"),
    (lambda: pc.image[0][2].find([[3, 4]]), pc.TokensError, None, "image[0][2]"),
    (lambda: pc.span(5), pc.ProgramError, "text", "int 5"),
    (lambda: pc.span("\ud83d"), pc.TokensError, None, "surrogate"),
    (lambda: pc.tokens(r'span("\x41")'), pc.ProgramError, None, "span("),
    (lambda: pc.span("cat").find([(0, 3)], "dog"), pc.TokensError, None, "'dog'"),
    (lambda: pc.span("cat", 1).find([(0, 3)], "cat"), pc.TokensError, None, 'span("cat", 1)'),
    (lambda: pc.prompt[5].select(5, 9), pc.TokensError, None, "prompt[5]"),
    (lambda: pc.generated[4].select(5, 9), pc.TokensError, None, "max_tokens"),
    # values
    (lambda: pc.Add([1.0, float("nan")], "embed"), pc.ShapeError, "value", "NaN"),
    (lambda: pc.Add([1e39], "embed"), pc.ShapeError, "value", "NaN"),
    (lambda: pc.Add([], "embed"), pc.ShapeError, "value", "[0]"),
    (lambda: pc.Add([[[1.0]]], "embed"), pc.ShapeError, "value", "[1, 1, 1]"),
    (lambda: pc.Vector((-1, -1), b"\0" * 4), pc.ShapeError, None, "[-1, -1]"),
    (lambda: pc.Vector((2,), b"\0" * 4), pc.ShapeError, None, "4 bytes"),
    (lambda: pc.Add("", "embed"), pc.ProgramError, "value", "200"),
    (lambda: pc.Add(pc.embed, "embed"), pc.ProgramError, "value", "pc.embed"),
    (lambda: pc.From(3), pc.ProgramError, "run", "int"),
    (lambda: pc.From(Keyed(), "embd"), pc.UnknownName, "site", "'embed'"),
    (lambda: pc.From(Keyed(), position=-1), pc.ProgramError, "position", "pc.prompt"),
    # ops
    (lambda: pc.Zero("embed", "promt"), pc.UnknownName, "tokens", "'prompt'"),
    (lambda: pc.Zero(pc.embed @ pc.prompt, pc.prompt[1]), pc.ProgramError, "tokens", "prompt[1]"),
    (lambda: pc.Add([1.0], "embed", scale="much"), pc.ProgramError, "scale", "str 'much'"),
    (lambda: pc.Replace([1.0], "embed", mask=[[1.0]]), pc.ShapeError, "mask", "[1, 1]"),
    (lambda: pc.Ablate([[1.0, 0.0], [0.0, 0.0]], "embed"), pc.ShapeError, "directions", "zeros"),
    (lambda: pc.Rotate([[1.0, 2.0], [2.0, 4.0]], 9, "embed"), pc.ShapeError, "plane", "[2, 2]"),
    (lambda: pc.Rotate([1.0, 2.0], 9, "embed"), pc.ShapeError, "plane", "[2]"),
    (lambda: pc.Add([1.0], "embed", norm="mean"), pc.UnknownName, "norm", "'mean'"),
    (lambda: pc.Clamp([1.0], "embed"), pc.ProgramError, "low", "bound"),
    (lambda: pc.Clamp([1.0], "embed", low=2, high=1), pc.ProgramError, "low", "2.0"),
    (lambda: pc.Clamp([0.0], "embed", low=2), pc.ShapeError, "direction", "zeros"),
    (lambda: pc.tokens("prompt |"), pc.ProgramError, None, "'prompt |'"),
    (lambda: pc.tokens("(" * 9999 + "prompt" + ")" * 9999), pc.ProgramError, None, "prompt"),
    (lambda: pc.tokens("prompt" + " | generated" * 70), pc.TokensError, None, "128"),
    (lambda: pc.tokens("token(1)" + " | token(1)" * 8), pc.TokensError, None, "128"),
    (lambda: doubled(pc.prompt, 60), pc.TokensError, None, "128"),
    (lambda: pc.prompt | pc.embed, pc.ProgramError, None, "Site pc.embed"),
    (lambda: pc.Use("\ud800"), pc.ProgramError, "name", "'\\ud800'"),
    (lambda: pc.Use("x" * 201), pc.ProgramError, "name", "200"),
    (lambda: pc.Use(3), pc.ProgramError, "name", "200"),
    (lambda: read({"type": "ablate", "at": "embed", "directions": {"type": ["x"]}}),
     pc.ProgramError, "edits[1].directions", "'vector'"),
    (lambda: pc.Noise(-1, "embed"), pc.ProgramError, "std", "-1.0"),
    (lambda: pc.Noise(1, "embed", seed=1.5), pc.ProgramError, "seed", "1.5"),
    (lambda: pc.Noise(1, "embed", seed=1 << 63), pc.ProgramError, "seed", "2**63"),
    (lambda: pc.Noise(1, "embed", relative="yes"), pc.ProgramError, "relative", "'yes'"),
    (lambda: read({"type": "noise", "at": "embed"}), pc.ProgramError, "edits[1]", "'std'"),
    (lambda: read({"type": "ablate", "at": "embed", "directions": {"type": "from", "run": "r"}}),
     pc.ProgramError, "edits[1].directions", "run[site]"),
    (lambda: pc.Replace([1.0], "embed", alpha=float("inf")), pc.ProgramError, "alpha", "inf"),
    (lambda: pc.Capture("embed", dtype="torch.flot32"), pc.UnknownName, "dtype", "'float32'"),
    (lambda: read({"type": "capture", "at": "embed", "project": {"type": "from", "run": "r"}}),
     pc.ProgramError, "edits[1].project", "run[site]"),
    # programs
    (lambda: Program.of([pc.Zero("embed"), "resid_post"]), pc.ProgramError, "edits[1]", "pc.Use('resid_post')"),
    (lambda: Program.of("st"), pc.ProgramError, "edits[0]", "pc.Use('st')"),
    (lambda: Program.of(["st"]), pc.ProgramError, "edits[0]", "pc.Use('st')"),
    (lambda: Program.of(5), pc.ProgramError, "edits[0]", "int 5"),
    (lambda: Program.of((), ["embed", "resid_pots"]), pc.UnknownName, "capture[1].at", "'resid_post'"),
    (lambda: Program.of((), pc.prompt[0]), pc.ProgramError, "capture", "prompt[0]"),
    # programs as JSON
    (lambda: Program.from_json("{"), pc.ProgramError, None, "JSON"),
    (lambda: edits_in('{"edits": [], "edits": [{"type": "zero", "at": "embed"}]}'), pc.ProgramError, None, "duplicate"),
    (lambda: edits_in('[{"type": "zero", "at": "embed", "at": "logits"}]'), pc.ProgramError, None, "duplicate"),
    (lambda: Program.from_json("[" * 100_000), pc.ProgramError, None, "JSON"),
    (lambda: Program.from_json("[]"), pc.ProgramError, None, "list"),
    (lambda: Program.from_json('{"edit": []}'), pc.UnknownName, "edit", "'edits'"),
    (lambda: Program.from_json('{"edits": {}}'), pc.ProgramError, "edits", "list"),
    (lambda: Program.from_json('{"edits": [], "edits": []}'), pc.ProgramError, None, "'edits'"),
    (lambda: Program.from_json('{"edits": [{"type": "zero", "at": "embed", "at": "logits"}]}'),
     pc.ProgramError, None, "'at'"),
    (lambda: Program.from_json('{"capture": [{"type": "zero", "at": "embed"}]}'),
     pc.ProgramError, "capture[0]", "Zero"),
    (lambda: read([]), pc.ProgramError, "edits[1]", "list"),
    (lambda: read({"type": "replce"}), pc.UnknownName, "edits[1].type", "'replace'"),
    (lambda: read({"at": "embed"}), pc.ProgramError, "edits[1]", "'type'"),
    (lambda: read({"type": "zero", "at": "embed", "token": "prompt"}), pc.UnknownName, "edits[1].token", "'tokens'"),
    (lambda: read({"type": "zero"}), pc.ProgramError, "edits[1]", "'at'"),
    (lambda: read({"type": "add", "at": "embed"}), pc.ProgramError, "edits[1]", "'value'"),
    (lambda: read({"type": "zero", "at": "embed", "tokens": 3}), pc.ProgramError, "edits[1].tokens", "text"),
    (lambda: read({"type": "zero", "at": "embd"}), pc.UnknownName, "edits[1].at", "'embed'"),
    (lambda: read({"type": "zero", "at": "embed", "tokens": "generated[-1]"}),
     pc.TokensError, "edits[1].tokens", "generated[-1]"),
    (lambda: read({"type": "add", "at": "embed", "value": [1], "scale": 10**400}),
     pc.ProgramError, "edits[1].scale", "number"),
    (lambda: read({"type": "add", "at": "embed", "value": 1}), pc.ProgramError, "edits[1].value", "'vector'"),
    (lambda: read({"type": "add", "at": "embed", "value": [[1, 2], [3, 4], [float("inf"), 0]]}),
     pc.ShapeError, "edits[1].value", "NaN"),
    (lambda: read({"type": "add", "at": "embed", "value": {"type": "vector", "shape": [2], "data": "AAAA"}}),
     pc.ShapeError, "edits[1].value", "3 bytes"),
    (lambda: read({"type": "add", "at": "embed", "value": {"type": "vector", "shape": [1], "data": "?"}}),
     pc.ProgramError, "edits[1].value", "Invalid"),
    (lambda: read({"type": "add", "at": "embed", "value": {"type": "vector", "shap": [1]}}),
     pc.UnknownName, "edits[1].value.shap", "'shape'"),
    (lambda: read({"type": "add", "at": "embed", "value": {"type": "from", "run": "r", "position": [0.5]}}),
     pc.ProgramError, "edits[1].value.position", "0.5"),
    (lambda: read({"type": "add", "at": "embed", "value": {"type": "from", "run": "r", "site": "resid_pree"}}),
     pc.UnknownName, "edits[1].value.site", "'resid_pre'"),
]  # fmt: skip


@pytest.mark.parametrize(("act", "kind", "path", "word"), ERRORS, ids=[str(i) for i in range(len(ERRORS))])
def test_errors_say_what_where_and_what_else(act, kind, path, word):
    with pytest.raises(pc.PatchclampError) as caught:
        act()
    assert type(caught.value) is kind
    assert caught.value.status == (422 if kind is pc.UnsupportedSite else 400)
    assert caught.value.path == path
    assert word in caught.value.message
    assert str(caught.value) == (caught.value.message if path is None else f"{path}: {caught.value.message}")


def test_unknown_names_list_what_is_available():
    with pytest.raises(pc.UnknownName) as caught:
        pc.Site("hidden")
    assert caught.value.message.endswith(", ".join(SPECS))


def test_errors_cross_a_process_as_data():
    for kind in TREE.values():
        error = kind("text", "edits[0].at")
        for again in (unpack(pack(error)), pickle.loads(pickle.dumps(error))):
            assert type(again) is kind
            assert (str(again), again.path) == ("edits[0].at: text", "edits[0].at")
    assert str(unpack(pack(KeyError("x")))) == "KeyError: 'x'"
    assert type(unpack(("Newer", "text", None))) is pc.RunError
    assert str(pc.ProgramError("text", "[2].at").under("edits")) == "edits[2].at: text"


def test_the_error_tree_is_drawn_as_it_is():
    drawn = re.findall(r"([├└]── |^ {4})(\w+)(?: +(\d{3}))?", errors.__doc__, re.MULTILINE)
    names = {name: status for _, name, status in drawn if name in errors.TREE}
    assert set(names) == set(errors.TREE)
    assert {name: int(status) for name, status in names.items() if status} == {
        name: kind.status for name, kind in errors.TREE.items() if name != "PatchclampError"
    }


def test_every_error_is_public():
    assert set(errors.TREE) <= set(pc.__all__)
    assert all(getattr(pc, name) is kind for name, kind in errors.TREE.items())
    kinds = re.compile(rf"^class (\w+)\((?:{'|'.join(errors.TREE)})\):", re.MULTILINE)
    files = {path.name: kinds.findall(path.read_text()) for path in Path(errors.__file__).parent.rglob("*.py")}
    assert {name: classes for name, classes in files.items() if classes} == {
        "errors.py": [name for name in errors.TREE if name != "PatchclampError"]
    }


def test_every_op_names_its_fields():
    assert {"Apply": pc.Apply} | {kind.__name__: kind for kind in OPS.values()} == {
        name: getattr(pc, name) for name in language.ops.__all__
    }
    for kind in OPS.values():
        by_name = (pc.Use, pc.Features, pc.SetFeature, pc.Reconstruct)
        named = {"condition", "edits"} if kind is pc.When else {"name" if kind in by_name else "at", "tokens"}
        assert named <= set(kind.__struct_fields__)


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 1 << 30))
def test_a_basis_is_orthonormal_and_spans_what_was_given(count, width, seed):
    rng = np.random.default_rng(seed)
    given = rng.standard_normal((count, width)) * 10.0 ** rng.integers(-3, 4, (count, 1))
    given[-1] = given[: max(count - 1, 1)].sum(0)  # adds nothing
    basis = orthonormal(pc.Vector.of(given)).array().astype(np.float64)
    assert len(basis) == np.linalg.matrix_rank(given / np.linalg.norm(given, axis=1, keepdims=True), tol=1e-5)
    np.testing.assert_allclose(basis @ basis.T, np.eye(len(basis)), atol=1e-6)
    left = given - given @ basis.T @ basis
    assert (np.linalg.norm(left, axis=1) <= 1e-5 * np.linalg.norm(given, axis=1)).all()


# -- the registry


def test_a_capture_joins_selections_as_they_are_joined():
    at = pc.embed @ pc.generated
    joined = {"|": at | pc.token(13), "&": at & pc.token(13), "-": at - pc.token(13)}
    for op, made in joined.items():
        assert str(made) == f"embed @ generated {op} token(13)"
        assert as_capture(str(made)) == as_capture(made)


def test_the_face_has_a_name_for_every_site():
    assert all(getattr(pc, name) == pc.Site(name) and name in pc.__all__ for name in SITES)


def test_lists_of_sites_are_in_the_registry_alone():
    """Elsewhere a list of more than four site words would be one to be kept up to date."""
    root = Path(pc.__file__).parent
    may = {"language/site.py", "sites/tables.py", "sites/untabled.py", "testing.py"}
    for file in sorted(root.rglob("*.py")):
        if file.relative_to(root).as_posix() not in may:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
                    items = node.keys if isinstance(node, ast.Dict) else node.elts
                    words = [item.value for item in items if isinstance(item, ast.Constant) and item.value in SITES]
                    assert len(words) <= 4, f"{file}: {words}"


def test_what_an_edit_keeps_is_what_it_does_not_move():
    attention, mlp = ({spec.name for spec in SITES.values() if spec.block == block} for block in ("attention", "mlp"))
    assert {"attn_in", "q", "k", "v", "z", "attn_out"} <= attention
    assert {"mlp_in", "router", "neurons", "mlp_out"} <= mlp
    for name, spec in SITES.items():
        block = {"attention": attention, "mlp": attention | mlp, "": set()}[spec.block]
        assert set(unmoved(name)) == block - {name, *spec.moves}
        assert list(unmoved(name)) == [other for other in SITES if other in unmoved(name)], "in the registry's order"
    assert {"attn_in", "k", "v"} <= set(unmoved("q")) <= attention - {"z", "attn_out"}
    assert {"attn_in", "q", "k", "v"} <= set(unmoved("z"))
    assert {*attention, "mlp_in", "router"} <= set(unmoved("neurons")) <= (attention | mlp) - {"mlp_out"}
    assert set(unmoved("attn_out")) == attention - {"attn_out", "mixer_out"}  # in a layer with attention one tensor
    assert set(unmoved("mlp_out")) == attention | mlp - {"mlp_out"}
    assert unmoved("attn_in") == unmoved("resid_post") == ()
    assert set(unmoved("mlp_in")) == attention


NOT_NUMBERS = ["1", b"1", True, None, 1j, float("nan"), [1.0], {}, np.array([1.0, 2.0]), np.bool_(True), np.str_("2")]


@pytest.mark.parametrize("wrong", NOT_NUMBERS, ids=repr)
def test_text_and_booleans_are_no_numbers(wrong):
    """In programs, in their JSON form, and in fuzzing's extra arguments."""
    for make, path in ((lambda: pc.Scale(wrong, "embed"), "factor"), (lambda: pc.Noise(wrong, "embed"), "std"),
                       (lambda: pc.Noise(1.0, "embed", seed=wrong), "seed")):  # fmt: skip
        with pytest.raises(pc.ProgramError) as caught:
            make()
        assert caught.value.path == path
    if isinstance(wrong, (str, bool)):
        program = {"edits": [{"type": "scale", "factor": wrong, "at": "embed"}]}
        with pytest.raises(pc.ProgramError) as caught:
            pc.Program.from_json(json.dumps(program))
        assert caught.value.path == "edits[0].factor"
    if wrong is not None:
        for name in ("fuzz_strength", "fuzz_seed"):
            with pytest.raises(pc.ProgramError) as caught:
                fuzz({"fuzz_strength": 1.0, name: wrong})
            assert caught.value.path == name


@pytest.mark.parametrize("wrong", [
    "text", b"text", ["1", "2"], [True, 1.0], [1j], np.array(["1"]), np.array(["2020-01-01"], "datetime64[D]"),
    np.ma.masked_array([1.0, 2.0], [True, False]), np.array([1j]), np.array([True]), {0: 1.0}, [float("nan")],
    [None], np.array([1.0, None]), lambda: 1, [[1.0], [1.0, 2.0]], [],
])  # fmt: skip
def test_only_real_dense_numbers_are_a_vector(wrong):
    with pytest.raises(pc.ShapeError):
        pc.Vector.of(wrong)


def test_none_is_no_layer():
    for wrong in (lambda: pc.resid_post[None], lambda: pc.z[1, None], lambda: pc.resid_post[True]):
        with pytest.raises(pc.ProgramError):
            wrong()


@pytest.mark.parametrize("name", EDITED_ELSEWHERE)
def test_names_whose_edits_reach_other_readers_there_are_for_reading(name):
    name = name.format(l=1)
    site = pc.site(name)
    assert pc.Capture(name).at == pc.From("run", name).site == site
    for edit in (lambda: pc.Zero(name), lambda: pc.Add([1.0], name), lambda: pc.Replace(pc.From("run", name), name)):
        with pytest.raises(pc.UnsupportedSite, match=site.name) as error:
            edit()
        assert error.value.path == "at"
    with pytest.raises(pc.UnsupportedSite) as error:
        Program.from_json(json.dumps({"edits": [{"type": "zero", "at": name}]}))
    assert error.value.path == "edits[0].at"
    with pc.LM("fake") as lm, pytest.raises(pc.UnsupportedSite) as error:
        rows_of(lm, [name])
    assert error.value.path == "sites[0]"


@pytest.mark.parametrize("kind", [list, tuple, np.array, pytest.importorskip("torch").tensor])
def test_a_mask_may_be_of_booleans(kind):
    mask = pc.Replace([1.0, 2.0], at=pc.embed, mask=kind([True, False])).mask
    assert mask == pc.Vector.of([1.0, 0.0])
    with pytest.raises(pc.ShapeError):
        pc.Replace(kind([True, False]), at=pc.embed)


def test_a_site_takes_a_list_of_layers():
    site = pc.resid_post[[9, 1, -1]]
    assert (site.layers, str(site)) == ((9, 1, -1), "resid_post[[9, 1, -1]]")
    for each in (site, pc.z[[0, 2], 3], pc.z[[4], 1:3]):
        assert pc.site(str(each)) == each
        assert pc.Program.from_json(pc.Program.of((), [each]).to_json()).capture[0].at == each
    for wrong in ([], [1, 1], [True], [1.0], [None], [[1]]):
        with pytest.raises(pc.ProgramError):
            pc.resid_post[wrong]
    for wrong in (
        "resid_post[[]]",
        "z[1, [2]]",
        "z[[1], 2, 3]",
        "resid_post[[1:3]]",
        "resid_post[[1]][2]",
        "embed[[1]]",
    ):
        with pytest.raises(pc.ProgramError):
            pc.site(wrong)


def test_a_span_that_occurs_several_times_must_be_chosen():
    prompt = Prompt([1, 2, 3], lambda: ("a cat a", [(0, 1), (1, 5), (5, 7)]))
    with pytest.raises(pc.TokensError, match=r"4 matches.*span\(\"a\", 3\)"):
        Prompt([1], lambda: ("a a a a", [(0, 7)])).select(pc.span("a"), 1)
    assert prompt.select(pc.span("cat"), 3).tolist() == [1]
    assert [prompt.select(pc.span("a", n), 3).tolist() for n in (0, 1, 2, -1)] == [[0], [1], [2], [2]]
    assert str(pc.span("a")) == 'span("a")' != str(pc.span("a", 0))


@pytest.mark.parametrize(("module", "written"), [
    ("model.layers.5", "resid_post[5]"), ("model.layers.5.self_attn", "attn_out[5]"), ("model.layers.5.mlp", "mlp_out[5]"),
    ("transformer.h.3.attn", "attn_out[3]"), ("model.layers.5.self_attn.o_proj", "z[5]"), ("h.2.mlp.down_proj", "neurons[2]"),
    ("gpt_neox.layers.3.attention", "attn_in[3]"),
])  # fmt: skip
def test_a_module_of_transformers_is_answered_with_the_site_there(module, written):
    with pytest.raises(pc.UnknownName) as caught:
        pc.site(module)
    assert written in str(caught.value)
    names = re.findall(r"\w+\[\d+(?:, \d+)?\]", str(caught.value))
    assert all(pc.site(name) for name in names)


def test_a_site_is_a_tuple_of_name_and_layer_too():
    assert pc.site(("resid_post", 5)) == pc.resid_post[5]
    assert pc.site(("z", 5, 3)) == pc.z[5, 3]
    with pytest.raises(pc.UnknownName):
        pc.site(("resid_pots", 5))
    for wrong in (("resid_post[3]", 5), ("blocks.3.hook_resid_post", 5), ("resid_post", None), ("resid_post", 1.5)):
        with pytest.raises(pc.ProgramError):
            pc.site(wrong)


@pytest.mark.parametrize(
    "module", ["model.layers.5.mlp.gate_proj", "transformer.h.3.attn.c_attn", "model.layers.5.norm"]
)
def test_a_module_without_a_site_gets_no_site(module):
    with pytest.raises(pc.UnknownName) as caught:
        pc.site(module)
    assert "got the module" not in str(caught.value)


@pytest.mark.parametrize(("module", "site"), {
    "model.embed_tokens": "embed", "transformer.ln_f": "final_norm", "lm_head": "logits",
    "model.layers[5].mlp": "mlp_out[5]", "model.layers.5.input_layernorm": "attn_in[5]", "gpt.h.5.v_proj": "v[5]",
}.items())  # fmt: skip
def test_a_modules_error_names_its_site(module, site):
    with pytest.raises(pc.UnknownName) as caught:
        pc.site(module)
    assert site in str(caught.value)


def test_captures_in_json_are_objects_or_sites():
    text = pc.Program.from_json('{"capture": ["resid_post[5]", {"type": "capture", "at": "z[2, 0]"}]}')
    assert text == pc.Program.of([], ["resid_post[5]", "z[2, 0]"])
    with pytest.raises(pc.UnknownName) as caught:
        pc.Program.from_json('{"capture": ["resid_pots[5]"]}')
    assert caught.value.path.startswith("capture[0]")
    with pytest.raises(pc.ProgramError) as caught:
        pc.Program.from_json('{"edits": ["resid_post[5]"]}')
    assert caught.value.path == "edits[0]"
