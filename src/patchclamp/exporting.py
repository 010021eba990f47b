"""Export: write the effect of a program into the weights of a checkpoint, where linear algebra allows it.

An edit h → A h + c on all tokens at the output of a projection, h = f · (W z + b), equals the projection
f · (A W z + A b + c / f). Directional ablation of the whole stream equals ablation of every write to it: with a
projector P, P P = P, and the stream s + a after a write `a` becomes P s + P a.
Source: weight orthogonalisation; Arditi et al. 2024 (arXiv:2406.11717), section 4.1.

An export verifies itself: in fp32, the new model's log-probabilities equal the program's (`MAX_ERROR`), both before
saving and after reloading. Otherwise nothing is left on disk.

    N rows · D model width · I width of a projection's input · V vocabulary
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch

from patchclamp.engines.grading import kl, log_softmax
from patchclamp.engines.tokenizer import HubTokenizer
from patchclamp.engines.transformers import load_net
from patchclamp.errors import ModelError, PatchclampError, ProgramError, UnsupportedSite
from patchclamp.grade import read_program
from patchclamp.language import Op, Program, Site, Vector, every
from patchclamp.language.ops import Ablate, Add, LowRank, SiteOp
from patchclamp.language.values import Named, as_dtype, as_file, as_flag, as_items, orthonormal
from patchclamp.lm import LM
from patchclamp.run import Run
from patchclamp.runtime.taps import find
from patchclamp.version import __version__

MAX_ERROR = 1e-4  # largest difference of log-probabilities, in fp32
MAX_RTOL = 1e-4  # largest relative difference between a projection's output and the rows at its site
RANDOM_PROMPTS, RANDOM_TOKENS = 4, 16
INPUT = {"attn_out": "z", "mlp_out": "neurons"}  # site at a projection's input, by the site at its output
STREAM = ("resid_pre", "resid_mid", "resid_post")
ENDINGS = ("wpe", "embed_positions")  # last name in the path of a table of learned positions
# Config flags that give a block's projections biases, in the Transformers class and in the vLLM class
BIAS_FLAGS = {"attn_out": "attention_bias", "mlp_out": "mlp_bias"}
WITH_FLAGS = ("LlamaForCausalLM",)
# vLLM's classes that tie the unembedding to the embedding, regardless of the config
ALWAYS_TIED = ("CohereForCausalLM", "Cohere2ForCausalLM", "Gemma2ForCausalLM")
CARD = """---
base_model: {model}
tags: [patchclamp]
---

# {name}

`{model}` with the effect of a patchclamp program written into its weights (patchclamp {version}, {dtype}).
{changes}

## Measured

| | |
|---|---|
| KL(original ‖ this model) of the next token, mean over {count} {kind} | {kl:.4g} nats |
| largest difference of a next-token log-probability from the program's, weights in fp32 | {error:.2g} |
| the same of the weights in this folder, {dtype} | {stored_error:.2g} |

The differences are over these and {random} of random tokens.

## Program

Whole in `program.json`:

```json
{program}
```
"""
SHOWN = 64  # characters of a vector's data in the card


class Exported(msgspec.Struct, frozen=True):
    """A model written by `export`.

    folder: the checkpoint
    kl: the mean KL(original ‖ exported) of the next token over the prompts, in nats
    error: the largest difference from the program's log-probabilities, with the edited weights in fp32
    stored_error: the same, with the weights rounded to the dtype that is written
    """

    folder: Path
    kl: float
    error: float
    stored_error: float


class _Edit(NamedTuple):
    """One edit. path: the op's path in the program; change: edits (rows [N, D], True to add the constant), fp64."""

    path: str
    change: Callable[[torch.Tensor, bool], torch.Tensor]


def export(
    model: str | LM, program: Any, out: str | os.PathLike[str], *, prompts: Sequence[Any] | None = None,
    chat: bool = False, bank: Mapping[str, Any] | None = None, dtype: str | None = None,
    skip_tokenizer_init: bool = False,
) -> Exported:  # fmt: skip
    """Write a checkpoint that, without patchclamp, behaves like a model with a program applied.

    Supports `Add`, `Ablate` and `LowRank` on all tokens at `attn_out` and `mlp_out`, where no norm follows the
    projection; `Ablate` at `embed`; and `Ablate` at every `resid_pre`, `resid_mid` and `resid_post`, with the same
    directions. `Add`, and `LowRank` with a bias, need a projection with a bias: the architecture has one, or its config
    can enable it (Llama). A tied unembedding keeps its weights, and is stored separately if the embedding changes.

    model: a hub id, a folder, or an `LM`, whose bank is used. The model is loaded on Transformers, on the CPU in fp32
    program: an op, a list of ops, or a `Program`
    out: a folder, which must be empty or not exist
    prompts: texts or token ids (with `chat`, texts or lists of messages) to measure the effect on; default: random
        tokens
    chat: send each prompt as the user turn of a chat
    bank: the vectors and programs that the program names
    dtype: the dtype of the written weights; default: the checkpoint's
    skip_tokenizer_init: export a model that has no tokenizer

    Raises `ProgramError` or `UnsupportedSite` with the path of an op that cannot be exported, and `ModelError` if the
    new model does not match the program.
    """
    out, asked = Path(as_file(out, "out")), as_items(() if prompts is None else prompts, "prompts")
    if as_flag(chat, "chat") and not asked:
        raise ProgramError("expected prompts to send as chats, got none", "chat")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ProgramError(f"expected an empty or new folder, got {out}", "out")
    name, own_bank = (model.model.name, model.bank) if isinstance(model, LM) else (model, None)
    made = read_program(program, "program")
    stored = None if dtype is None else getattr(torch, as_dtype(dtype))
    options = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": skip_tokenizer_init}
    with LM(name, "transformers", **options) as lm:
        for each, entry in (own_bank if bank is None and own_bank is not None else bank or {}).items():
            lm.bank[each] = entry
        plan = _Plan(lm, made)
        rng = np.random.default_rng(0)
        random = rng.integers(lm.model.d_vocab, size=(RANDOM_PROMPTS, RANDOM_TOKENS)).tolist()
        ids = [_ids(lm, each, chat, f"prompts[{i}]") for i, each in enumerate(asked)] + random
        before = _program_logprobs(lm, ids, Program())
        wanted = _program_logprobs(lm, ids, made)
        source, tokenizer = lm.engine.model.name, lm.tokenizer
    net, original = _load(source)
    changes = plan.apply(net)
    error = _largest(_logprobs(net, ids), wanted)
    if not error <= MAX_ERROR:
        raise ModelError(f"the new weights do not match the program: a log-probability differs by {error:.2g}")
    stored = original if stored is None else stored
    for tensor in net.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(stored))  # not computed buffers, such as rotary frequencies
    expected = _logprobs(net, ids)
    was_there = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out) as folder:
            partial = Path(folder)
            net.to(stored).save_pretrained(partial)
            if isinstance(tokenizer, HubTokenizer):
                tokenizer.inner.save_pretrained(partial)
            del net
            found = _logprobs(_load(folder)[0], ids)
            if not _largest(found, expected) <= MAX_ERROR:
                raise ModelError(f"the saved checkpoint changes a log-probability by {_largest(found, expected):.2g}")
            count = len(asked) or RANDOM_PROMPTS
            measured = float(np.mean([kl(p, q) for p, q in zip(before[:count], found, strict=False)]))
            result = Exported(out, measured, error, _largest(found, wanted))
            text = CARD.format(
                model=name, name=out.resolve().name, version=__version__, dtype=str(stored).removeprefix("torch."),
                changes="\n".join(changes), count=count, kind="chats" if chat else "prompts", random=RANDOM_PROMPTS,
                kl=measured, error=error, stored_error=result.stored_error,
                program=json.dumps(_shown(json.loads(plan.program.to_json())), indent=1),
            )  # fmt: skip
            (partial / "program.json").write_text(plan.program.to_json())
            (partial / "README.md").write_text(text)
            for file in partial.iterdir():
                file.rename(out / file.name)
    except OSError as error:
        raise ProgramError(f"cannot write {out}: {error}", "out") from None
    finally:
        if not was_there and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
    return result


class _Plan:
    """A program's edits, grouped by target: projections (by site and layer), the embedding, and the stream.

    Raises `ProgramError` or `UnsupportedSite`, with the op's path, for an op that weights cannot express.
    """

    def __init__(self, lm: LM, program: Program) -> None:
        self._lm, self._sites = lm, lm.sites
        if program.readout_path:
            raise ProgramError("a checkpoint cannot capture: remove the program's captures", program.readout_path)
        if not program.edits:
            raise ProgramError("expected at least one edit", "edits")
        rng = np.random.default_rng(1)
        self._prompt: list[int] = rng.integers(lm.model.d_vocab, size=RANDOM_TOKENS).tolist()
        lm.run(self._prompt, max_tokens=1, edits=program.edits)  # raises any error of the program itself
        self.program = Program()  # the program with names resolved
        self.at: dict[tuple[str, int], list[_Edit]] = {}
        self.embed: list[_Edit] = []
        self._stream: dict[int, str] = {}  # the op's path, by ablated point
        self._basis: np.ndarray | None = None  # directions of these ablations
        self._captures: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for i, given in enumerate(program.edits):
            for path, op in lm.bank.expanded(given, f"edits[{i}]"):
                self._read(op, path)
        if self._basis is not None:
            self._every_write(self._basis)
        self._read_projections()

    def _read(self, op: Op, path: str) -> None:
        if not isinstance(op, (Add, Ablate, LowRank)):
            raise ProgramError(f"{type(op).__name__} cannot be exported: only Add, Ablate and LowRank can", path)
        if op.tokens != every:
            raise ProgramError(f"expected all tokens (weights affect all), got {op.tokens}", f"{path}.tokens")
        try:
            fields = [field for field in ("value", "directions", "weight", "rotation") if hasattr(op, field)]
            op = msgspec.structs.replace(op, **{field: self._vector(getattr(op, field), field) for field in fields})
            self.program = Program((*self.program.edits, op))
            change = self._change(op)
            if op.at.name in STREAM:
                self._of_stream(op, path)
            elif op.at.name == "embed" and isinstance(op, Ablate):
                self.embed.append(_Edit(path, change))
            elif op.at.name in INPUT:
                for ref in self._sites.resolve(op.at):
                    assert ref.layer is not None
                    self.at.setdefault((op.at.name, ref.layer), []).append(_Edit(path, change))
            else:
                raise UnsupportedSite(
                    f"{type(op).__name__} at {op.at} cannot be exported: expected attn_out or mlp_out, or an Ablate at "
                    "embed or at every resid_pre, resid_mid and resid_post", "at"
                )  # fmt: skip
        except PatchclampError as error:
            raise error.under(path) from None

    def _change(self, op: Add | Ablate | LowRank) -> Callable[[torch.Tensor, bool], torch.Tensor]:
        if isinstance(op, Add):
            if op.norm is not None:
                raise ProgramError("Add with norm='match' cannot be exported, because it depends on the row", "norm")
            added_D = op.scale * _rows(op.value)[0]
            return lambda h_ND, constant: h_ND + added_D if constant else h_ND
        if isinstance(op, Ablate):
            basis_kD = _rows(orthonormal(op.directions))
            return lambda h_ND, _: h_ND - op.strength * (h_ND @ basis_kD.T) @ basis_kD
        rotation_kD = _rows(op.rotation)
        along_kD = _rows(op.weight) - rotation_kD
        bias_k = 0.0 if op.bias is None else torch.tensor(op.bias.array()).double()
        return lambda h_ND, constant: h_ND + (h_ND @ along_kD.T + (bias_k if constant else 0.0)) @ rotation_kD

    def _vector(self, value: Any, field: str) -> Vector:
        found = self._lm.bank[value.name] if isinstance(value, Named) else value
        if not isinstance(found, Vector) or (field == "value" and len(found.shape) != 1):
            raise ProgramError("expected one vector for all tokens, as numbers or a bank name", field)
        return found

    def _of_stream(self, op: Op, path: str) -> None:
        assert isinstance(op, SiteOp)
        if not isinstance(op, Ablate) or op.strength != 1.0:
            raise UnsupportedSite(
                f"{type(op).__name__} at {op.at} cannot be exported, because it accumulates over layers: expected an "
                "Ablate with strength 1, or attn_out or mlp_out", "at"
            )  # fmt: skip
        basis = _rows(orthonormal(op.directions)).numpy()
        if self._basis is None:
            self._basis = basis
        elif not np.allclose(basis.T @ basis, self._basis.T @ self._basis, atol=1e-6):
            raise ProgramError("expected the same directions as the other ablations of the stream", "directions")
        self._stream |= {ref.point: path for ref in self._sites.resolve(op.at)}

    def _every_write(self, basis: np.ndarray) -> None:
        """Convert an ablation at every stream point to ablations of every write to the stream."""
        path = next(iter(self._stream.values()))
        left = [point.number for point in self._sites.points
                if point.kind in ("stream", "mid", "stream_end") and point.number not in self._stream]  # fmt: skip
        if left:
            raise UnsupportedSite(
                f"the stream is not ablated at {self._sites.label(left[0])}: weights can only ablate it at every "
                "resid_pre, resid_mid and resid_post", path
            )  # fmt: skip
        if self.embed:
            raise ProgramError("expected ablations at embed or of the stream, got both", self.embed[0].path)
        written = [(name, layer) for name in INPUT for layer in self._sites.layers_with(name)]
        change = self._change(Ablate(basis, Site("attn_out")))
        run = self._captured(Site("resid_pre", 0), Site("resid_post", -1), *{Site(name) for name, _ in written})
        end, start = run[f"resid_post[{self._sites.layers - 1}]"], run["resid_pre[0]"]
        if not _is_close(sum((run[f"{name}[{layer}]"] for name, layer in written), start), end):
            raise UnsupportedSite("this model's stream is not the sum of embed, attn_out and mlp_out", path)
        self.embed.append(_Edit(path, change))
        for place in written:
            self.at.setdefault(place, []).append(_Edit(path, change))

    def _captured(self, *sites: Site) -> Run:
        return self._lm.run(self._prompt, max_tokens=1, capture=list(sites))

    def _read_projections(self) -> None:
        """Capture the rows at each site and at the input of its projection."""
        for (name, layer), edits in self.at.items():
            if not self._has_projection(name, layer):
                raise UnsupportedSite(f"{name}[{layer}] is not the output of one projection", edits[0].path)
        run = self._captured(*{Site(each) for name, _ in self.at for each in (name, INPUT[name])})
        for name, layer in self.at:
            self._captures[name, layer] = run[f"{INPUT[name]}[{layer}]"].flatten(1), run[f"{name}[{layer}]"]

    def _factor(self, module: Any, name: str, layer: int, path: str) -> float:
        """Return the constant factor from the projection's output to the site's rows, or raise `UnsupportedSite`."""
        (weight_ID, bias_D), (input_NI, rows_ND) = _matrix(module), self._captures[name, layer]
        made_ND = input_NI @ weight_ID + (0.0 if bias_D is None else bias_D)
        factor = float((rows_ND * made_ND).sum() / (made_ND * made_ND).sum())
        if not _is_close(factor * made_ND, rows_ND):
            raise UnsupportedSite(
                f"{name}[{layer}] is not a multiple of its projection's output; a norm may follow it", path
            )
        return 1.0 if math.isclose(factor, 1.0, rel_tol=MAX_RTOL) else factor

    def _has_projection(self, name: str, layer: int) -> bool:
        kind = self._sites.family.points.get(INPUT[name])
        return kind is not None and kind.transformers.moment == "in" and layer in self._sites.layers_with(INPUT[name])

    def module(self, name: str, layer: int) -> str:
        """Return the path of a projection's module."""
        return self._sites.family.points[INPUT[name]].transformers.module.format(l=layer)

    def apply(self, net: Any) -> list[str]:
        """Edit a model's weights, and return a sentence per kind of change for the model card."""
        changes = []
        with torch.no_grad():
            if self.embed:
                changes += self._untie(net)
                tables = [net.get_input_embeddings()]
                if self._basis is not None:
                    tables += [module for path, module in net.named_modules() if path.endswith(ENDINGS)]
                for table in tables:
                    table.weight.copy_(_edited(table.weight, self.embed))
                changes.append("Its embedding is edited.")
            for (name, layer), edits in self.at.items():
                self._project(net, name, layer, edits)
            for name in INPUT:
                if layers := sorted(layer for each, layer in self.at if each == name):
                    changes.append(f"The projection to `{name}` is edited in layers {layers}.")
        return changes

    def _untie(self, net: Any) -> list[str]:
        """Untie the unembedding from the embedding, and return a sentence for the model card if it was tied."""
        head, path = net.get_output_embeddings(), self.embed[0].path
        if head.weight is not net.get_input_embeddings().weight:
            return []
        if type(net).__name__ in ALWAYS_TIED:
            raise UnsupportedSite(f"vLLM always ties the unembedding of {type(net).__name__} to the embedding", path)
        head.weight = torch.nn.Parameter(head.weight.clone())
        net.config.tie_word_embeddings = False
        return ["The unembedding was tied to the embedding; it is stored separately, unchanged."]

    def _project(self, net: Any, name: str, layer: int, edits: list[_Edit]) -> None:
        module = find(net, self.module(name, layer))
        factor = self._factor(module, name, layer, edits[0].path)
        weight_ID, bias_D = _matrix(module)
        constant_D = torch.zeros(weight_ID.shape[1]).double() if bias_D is None else bias_D.double()
        edited_ID, constant_D = _edited(weight_ID, edits), _edited(factor * constant_D[None], edits, True)[0] / factor
        weight_ID.copy_(edited_ID)  # a view of the module's weight
        if bias_D is None and constant_D.any():
            _add_biases(net, self, name, edits[0].path)
            _, bias_D = _matrix(module)
        if bias_D is not None:
            bias_D.copy_(constant_D)


def _rows(vector: Any) -> torch.Tensor:
    return torch.tensor(vector.rows()).double()


def _shown(data: Any) -> Any:
    """Truncate the vectors in a program's plain data, for the model card."""
    if isinstance(data, dict):
        return {name: _shown(value) for name, value in data.items()}
    if isinstance(data, list):
        return [_shown(value) for value in data]
    return f"{data[:SHOWN]} …" if isinstance(data, str) and len(data) > SHOWN else data


def _add_biases(net: Any, plan: _Plan, name: str, path: str) -> None:
    """Set the config flag for biases in attention or MLP blocks, and add zero biases to their linear layers."""
    if type(net).__name__ not in WITH_FLAGS:
        raise UnsupportedSite(
            f"{type(net).__name__} has no bias at {name}, which a constant requires: export an Ablate, or a "
            "LowRank without bias", path
        )  # fmt: skip
    setattr(net.config, BIAS_FLAGS[name], True)
    for layer in range(net.config.num_hidden_layers):
        block = find(net, plan.module(name, layer).rpartition(".")[0])
        for projection in block.children():
            if isinstance(projection, torch.nn.Linear):
                projection.bias = torch.nn.Parameter(torch.zeros(projection.out_features))


def _matrix(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return views of a projection's weight [I, D], which multiplies rows from the right, and its bias [D] or None."""
    weight = module.weight.detach()
    bias = None if getattr(module, "bias", None) is None else module.bias.detach()
    return weight if type(module).__name__ == "Conv1D" else weight.T, bias


def _edited(rows_ND: torch.Tensor, edits: Iterable[_Edit], constant: bool = False) -> torch.Tensor:
    edited = rows_ND.double()
    for edit in edits:
        edited = edit.change(edited, constant)
    return edited


def _is_close(made: Any, rows: Any) -> bool:
    return bool(torch.linalg.vector_norm(made - rows) <= MAX_RTOL * torch.linalg.vector_norm(rows))


def _load(model: str) -> tuple[Any, torch.dtype]:
    """Load a model in fp32. Return it and its checkpoint's dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    if getattr(config, "quantization_config", None) is not None or config.get_text_config() is not config:
        raise ModelError("expected an unquantised checkpoint of a text model", "model")
    dtype = config.dtype or AutoModelForCausalLM.from_pretrained(model, dtype="auto", device_map="meta").dtype
    return load_net(model, torch.float32).eval(), cast(torch.dtype, dtype)


def _ids(lm: LM, prompt: Any, chat: bool, path: str) -> list[int]:
    """Return a prompt's token ids; with `chat`, the prompt is a user turn or a list of messages."""
    try:
        if chat:
            return lm.tokens(messages=[{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        return lm.tokens(prompt) if isinstance(prompt, str) else as_items(prompt, "")
    except PatchclampError as error:
        raise error.under(path) from None


def _logprobs(net: Any, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return the next-token log-probabilities [V] after each prompt, from a plain forward pass."""
    with torch.inference_mode():
        return [log_softmax(net(torch.tensor([ids])).logits[0, -1].numpy()) for ids in prompts]


def _program_logprobs(lm: LM, prompts: list[list[int]], program: Program) -> list[np.ndarray]:
    runs = lm.run(prompts, max_tokens=1, edits=program.edits, capture=[Site("logits")])
    for run in runs:
        if run.error is not None:
            raise run.error
    return [log_softmax(np.asarray(run["logits"])[-1]) for run in runs]


def _largest(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Return the largest absolute difference between log-probabilities. Infinities (masked logits) must be equal."""
    return max(float(np.abs(np.where(a == b, 0.0, a - b)).max()) for a, b in zip(found, wanted, strict=True))
