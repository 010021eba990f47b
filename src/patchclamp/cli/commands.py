"""The commands other than studies (`demo`, `doctor`, `export`, `harvest`, `parity`, `push`, `run`, `serve`, `sites`),
and the parsing of options."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from patchclamp.errors import PatchclampError, ProgramError, unknown

if TYPE_CHECKING:
    from patchclamp.lm import LM
    from patchclamp.studies import Study
    from patchclamp.studies.study import StudyField

OUT = Console(highlight=False)  # results; everything else goes to standard error
ERR = Console(stderr=True, highlight=False)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A hub id, a folder, or smollm2, the small model of the demo extra.")
]
Engine = Annotated[
    str | None, typer.Option("--engine", metavar="NAME", help="vllm, transformers or fake; vllm where it is installed.")
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="By default the checkpoint's, or float32 on a CPU below 2 B parameters.")
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the engine, by its own name; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
NOT_OPTIONS = {"model": "the first argument", "engine": "--engine", "prove": "patchclamp sites"}


# -- parsing options


def under(option: str, read: Callable[..., Any], *given: Any) -> Any:
    """Call `read` to parse an option. Errors without a path get the option as their path."""
    try:
        return read(*given)
    except PatchclampError as error:
        raise (error if error.path else error.under(option)) from None
    except ValueError as error:
        raise ProgramError(f"{error}", option) from None


def read_options(pairs: Sequence[str] | None, dtype: str | None = None) -> dict[str, Any]:
    """Parse engine options: `key=value` pairs with JSON or text values, and `--dtype`."""
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    for pair in pairs or ():
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            raise ProgramError(f"expected KEY=VALUE, such as max_model_len=512, got {pair!r}", "--option")
        key = key.strip()
        if key in NOT_OPTIONS:
            raise ProgramError(f"{key} is not an option of the engine: see {NOT_OPTIONS[key]}", "--option")
        if key in options:
            raise ProgramError(f"duplicate option {key}", "--option")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def check_engine(name: str | None, option: str = "--engine") -> None:
    """Raise `UnknownName` for an unknown engine."""
    from patchclamp.engines import NAMES

    if name is not None and name not in NAMES:
        raise unknown("engine", name, NAMES, option)


def check_file(path: Path | None, option: str) -> None:
    """Create the parent folder of a file, and raise `ProgramError` if the file cannot be written."""
    from patchclamp.plots.style import check_target

    if path is None:
        return
    check_target(path, option)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ProgramError(f"{path} cannot be written", option)


def flag_of(field: StudyField) -> str:
    """Return the option name of a study's field, such as `--site` for `sites`."""
    return f"--{(field.arg.option or field.name).replace('_', '-')}"


def read_fields(study: type[Study], given: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Convert options to a study's fields. A value that depends on the model becomes a function of (lm, study)."""
    fields = {}
    for name, text in given["fields"].items():
        field = study.fields()[name]
        assert field.arg.parse is not None  # fields without a parser are not options
        parse = functools.partial(under, flag_of(field), field.arg.parse)
        if text is None or text == [] or (name == "source" and given["source"]):
            continue
        if isinstance(text, (int, float)):
            fields[name] = text
        elif name == "mask":
            fields[name] = read_mask(text)
        elif field.arg.many:
            several = [parse(one) for one in text]
            one_of = field.arg.read is None and name not in ("tokens", "seeds", "at")
            fields[name] = several[0] if one_of and len(several) == 1 and not isinstance(several[0], dict) else several
        else:
            fields[name] = parse(text)
    if given["source"]:
        of = {name: given["source"][name] for name in ("mean_tokens", "mean_by_position", "draws")}
        source = read_source(given["fields"]["source"], fields.get("seed", 0), **of)
        fields |= {} if source is None else {"source": source}
    if given["pairs"]:
        fields |= read_pairs(fields, given["pairs"]["pairs"], study)
    return fields


def read_source(text: str | None, seed: int, mean_tokens: str | None, mean_by_position: bool, draws: int) -> Any:
    """Parse a source: `zeros`, `bank:NAME`, or a file of prompts to average or draw from."""
    from patchclamp.studies import MeanOf, Resampled
    from patchclamp.studies.inputs import lines_of

    kind, sign, rest = (text or "").partition(":")
    for given, option, of in (
        (mean_tokens is not None, "--mean-tokens", "mean"), (mean_by_position, "--mean-by-position", "mean"),
        (draws > 1, "--draws", "resample"),
    ):  # fmt: skip
        if given and kind != of:
            raise ProgramError(f"expected --source {of}:FILE, got {text or 'none'}", option)
    if text is None or text == "zeros" or (kind == "bank" and rest):
        return text
    if not sign or kind not in ("mean", "resample"):
        raise ProgramError(f"expected zeros, bank:NAME, mean:FILE or resample:FILE, got {text!r}", "--source")
    prompts = [line for line in under("--source", lines_of, Path(rest)) if line.strip()]
    return MeanOf(prompts, mean_tokens, mean_by_position) if kind == "mean" else Resampled(prompts, seed, draws)


def read_mask(text: str) -> Any:
    """Parse a mask: a bank entry, an array file, or columns. Columns are resolved once the model is loaded."""
    from patchclamp.language.tokens import parse_index
    from patchclamp.studies.sources import columns_mask

    if text.startswith("bank:"):
        return text.removeprefix("bank:")
    if text.endswith(".npy"):
        return read_array(Path(text), "--mask")
    try:
        columns = [parse_index(part) for part in text.split(",")]
    except PatchclampError:
        raise ProgramError(
            f"expected columns such as 0:64,100, bank:NAME, or FILE.npy, got {text!r}", "--mask"
        ) from None

    return lambda lm, study: under("--mask", columns_mask, lm, list(study.sites), columns)


def read_array(path: Path, option: str) -> Any:
    """Load an array saved by NumPy."""
    import numpy as np

    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ProgramError(f"expected an array saved by NumPy, got {path}: {error}", option) from None


class PairLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the `--pairs` file for a study of clean and corrupt prompts."""

    clean: Any
    corrupt: Any
    answer: Any
    foil: Any = None
    positions: Any = None


class ContrastLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the `--pairs` file for a study of contrasting prompts."""

    positive: Any
    negative: Any


def read_pairs(given: dict[str, Any], file: Path | None, study: type[Study]) -> dict[str, Any]:
    """Read prompt pairs from a file, one JSON object per line; without a file, check that the options form a pair."""
    kind = PairLine if "clean" in study.fields() else ContrastLine
    required = msgspec.structs.fields(kind)
    if file is None:
        if missing := [field.name for field in required if field.required and field.name not in given]:
            raise ProgramError(f"missing option --{missing[0]}; or pass a file with --pairs", study.command)
        return {}
    if twice := [name for name in kind.__struct_fields__ if name in given and name != "positions"]:
        raise ProgramError(f"--{twice[0]} is not supported with --pairs: put it in the lines of the file", "--pairs")
    from patchclamp.studies.inputs import lines_of

    lines = []
    for number, line in enumerate(under("--pairs", lines_of, file), 1):
        if line.strip():
            try:
                lines.append(msgspec.json.decode(line, type=kind))
            except msgspec.MsgspecError as error:
                raise ProgramError(f"line {number} of {file}: {error}", "--pairs") from None
    if not lines:
        raise ProgramError(f"{file} has no pairs", "--pairs")
    pairs: dict[str, Any] = {name: [getattr(line, name) for line in lines] for name in kind.__struct_fields__}
    if kind is ContrastLine:
        return pairs
    without = [of is None for of in pairs["positions"]]
    if any(without) and not all(without):
        raise ProgramError(f"{file}: expected positions in all pairs or none", "--pairs")
    if all(without):
        del pairs["positions"]
    elif "positions" in given:
        raise ProgramError("--positions is not supported with --pairs, whose file contains them", "--pairs")
    elif study.command == "sweep":
        pairs["positions"] = by_label(pairs["positions"])
    return pairs


def by_label(positions: list[Any]) -> dict[str, list[Any]]:
    """Convert each pair's positions to a mapping for `PatchSweep`, from a label to one selection per pair."""
    labels = list(positions[0]) if isinstance(positions[0], dict) else []
    for number, of in enumerate(positions):
        if not labels or not isinstance(of, dict) or list(of) != labels:
            raise ProgramError(
                f"pair {number} has positions {of!r}; expected an object with the labels of the first pair, and a "
                'selection each, such as {"subject": "span(\'Rome\')", "last": -1}', "--pairs"
            )  # fmt: skip
    return {label: [of[label] for of in positions] for label in labels}


def check(study: Any, steer: dict[str, Any], drawn: bool) -> None:
    """Raise every error of a study that can be detected before its model is loaded."""
    from patchclamp.language import Op, Site
    from patchclamp.language.site import At, parse_site
    from patchclamp.language.tokens import parse_tokens
    from patchclamp.studies import FitProbe, FuzzSweep, Steering
    from patchclamp.studies.metric import grade

    fields = study.fields()
    for name in ("sites", "senders", "site"):
        if name in fields:
            sites = getattr(study, name)
            for site in [sites] if isinstance(sites, (str, Site, At, Op)) else sites:
                if isinstance(site, str):
                    under(name, parse_site, site)
    for name in ("positions", "source_position", "target_position", "tokens"):
        chosen = getattr(study, name) if name in fields and fields[name].arg.option != "token" else None
        for text in chosen if isinstance(chosen, list) else [chosen]:
            if isinstance(text, str) and text != "each":
                under(name, parse_tokens, text)
    if getattr(study, "metric", None) is not None:
        foils = study.foil if isinstance(study.foil, list) else [study.foil]
        grade(study.metric, (0,), None if None in foils else (1,))
    if isinstance(study, (FitProbe, FuzzSweep)):
        study.check()
    if isinstance(study, Steering):
        study.check(steer["prompts"] is not None)
        if steer["scales"] and steer["prompts"] is None:
            raise ProgramError("requires --prompts, the texts to steer", "--scales")
        if drawn and not study.held_out and steer["prompts"] is None:
            raise ProgramError("expected held-out prompts or --prompts: otherwise nothing can be plotted", "held_out")


@contextmanager
def serving(on: str | None, model: str, lm: LM, options: dict[str, Any]) -> Iterator[LM]:
    """Yield the `LM` that runs the exact patches: `lm` if `on` is None, else a new `LM` on that engine or server."""
    if on is None:
        yield lm
    elif "://" in on:
        with loaded(on, None, {name: value for name, value in options.items() if name != "dtype"}) as other:
            yield other
    else:
        with loaded(model, on, options) as other:
            yield other


# -- models


@contextmanager
def loaded(model: str, engine: str | None, options: dict[str, Any], prove: bool = True) -> Iterator[LM]:
    """Load an `LM` under a spinner, and close it at the end. By default vLLM logs only errors."""
    with quietly(), ERR.status(f"loading {model} …"):
        from patchclamp.proving import ProvedLM

        lm = ProvedLM(model, engine, prove=prove, **options)
    with lm:
        yield lm


@contextmanager
def quietly() -> Iterator[None]:
    """Silence logs and warnings that a user cannot act on."""
    level = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR").upper()  # newer vLLM reads it at startup
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for results
    logging.getLogger("vllm").setLevel(logging.getLevelNamesMapping().get(level, logging.ERROR))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


# -- commands

DEMO = "smollm2"
CLEAN, CORRUPT = "The Eiffel Tower is located in the city of", "The Colosseum is located in the city of"
ANSWER, FOIL = " Paris", " Rome"
SITES = ("resid_pre", "attn_out", "mlp_out")
# a KV cache for a few short prompts, so that a laptop remains usable
DEMO_OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 2**28,
    },
    "transformers": {"dtype": "float32"},
}  # fmt: skip


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to put the pictures.")] = Path("patchclamp-demo"),
    engine: Engine = None,
) -> None:
    """Find where a small model keeps the difference between the Eiffel Tower and the Colosseum."""
    from patchclamp.cli.show import show_best, wrote
    from patchclamp.plots import check_targets
    from patchclamp.studies import patch_sweep

    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' progress bars would garble the text
    png, html = out / "sweep.png", out / "sweep.html"
    check_engine(engine)
    check_targets(png, html)
    name = engine or ("vllm" if importlib.util.find_spec("vllm") is not None else "transformers")
    if engine is None and name == "transformers":
        OUT.print("vLLM is not installed here, so this demo runs on Transformers instead: same programs, same numbers.")
    answer, foil = ANSWER.strip(), FOIL.strip()
    OUT.print("Two prompts that differ in their subject:\n")
    OUT.print(Text(f"  clean    {CLEAN}", style="blue"))
    OUT.print(Text(f"  corrupt  {CORRUPT}\n", style="dark_orange3"))
    OUT.print(
        f"The first should continue with {answer}, the second with {foil}. The corrupt prompt is now run many times, "
        f"each time with one activation (one site, layer and token) replaced by the clean run's. Where that restores "
        f"{answer}, the activation carries the difference. The number is the logit difference {answer} − "
        f"{foil}: above 0 the model prefers {answer}.\n"
    )
    with ExitStack() as stack:
        with step(f"Loading {DEMO} on {name}"):
            lm = stack.enter_context(loaded(DEMO, name, DEMO_OPTIONS.get(name, {})))
        with step(f"Patching {', '.join(SITES)} in {lm.model.layers} layers"):
            result = patch_sweep(lm, clean=CLEAN, corrupt=CORRUPT, answer=ANSWER, foil=FOIL, sites=SITES)
    show_best(OUT, result.picture(), 5)
    OUT.print()
    wrote(OUT, result.plot(png))
    wrote(OUT, result.to_html(html))


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print a step's description, and its duration when it ends."""
    OUT.print(Text(f"{what} …", style="bold"))
    began = time.perf_counter()
    yield
    OUT.print(f"  done in {time.perf_counter() - began:.1f} s")


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="A hub id, a folder, or smollm2: started and examined too.")
    ] = None,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Examine versions, the seams into vLLM and, with a model, its configuration, sites, fusions, graphs and memory.

    The exit status is 1 if there is a problem.
    """
    from patchclamp.cli import show
    from patchclamp.doctor import examine

    with quietly(), ERR.status("examining …"):
        report = examine(model, engine, **read_options(option, dtype))
    if as_json:
        answer = {"ok": not report.problems, "findings": msgspec.to_builtins(report.findings)}
        OUT.print_json(data=answer, highlight=False)
    else:
        show.findings(OUT, report)
    raise typer.Exit(1 if report.problems else 0)


def export(
    model: Model,
    program: Annotated[str, typer.Option(
        help='Same as --edit of `patchclamp run`: JSON, a .json file, or named programs from --bank.')],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The new checkpoint's folder; must be empty or new.")],
    bank: Annotated[Path | None, typer.Option(help="A safetensors file of vectors and programs, by name.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(
        help="A text to measure the effect on; repeatable. Random tokens by default.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as the user's turn of a chat.")] = False,
    dtype: Annotated[str | None, typer.Option(help="The written dtype; the checkpoint's by default.")] = None,
) -> None:  # fmt: skip
    """Write a checkpoint with a program's effect folded into the weights, checked against it, with a model card.

    Supports linear edits on all tokens at attn_out and mlp_out, and ablations of the whole stream.
    """
    from patchclamp.exporting import export as write
    from patchclamp.store.named import NamedBank
    from patchclamp.studies.inputs import edits_in

    edits, entries = under("--program", edits_in, program), NamedBank()
    if bank is not None:
        under("--bank", entries.load, bank)
    with quietly(), ERR.status("exporting …"):
        made = write(model, edits, out, prompts=prompt, chat=chat, bank=entries, dtype=dtype)
    OUT.print(f"wrote {made.folder}: {made.kl:.4g} nats from the original; log-probabilities equal the program's "
              f"within {made.error:.2g}, as stored within {made.stored_error:.2g}", soft_wrap=True)  # fmt: skip


def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub id, a folder, smollm2, or the URL of a server.")],
    prompt: Annotated[str, typer.Argument(help="The text of the prompt.")],
    edit: Annotated[list[str] | None, typer.Option(
        help='An op as JSON, such as {"type": "zero", "at": "mlp_out[5]"}, a .json file, or named programs, such as '
             '"0.3 calm + 0.2 honest @ generated"; repeatable.')] = None,
    capture: Annotated[list[str] | None, typer.Option(
        help="resid_post[12], 'z[5, 3] @ prompt[-1]', …; repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the captures into this safetensors file.")] = None,
    bank: Annotated[Path | None, typer.Option(help="A safetensors file of vectors and programs, by name.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as the user's turn of a chat.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=1)] = 16,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; greedy by default.")] = None,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
) -> None:  # fmt: skip
    """Run one prompt with edits and captures, and print its text."""
    from patchclamp.language import Program
    from patchclamp.studies.inputs import edits_in

    if capture and out is None:
        raise ProgramError("--capture requires a file for the captures", "--out")
    if out is not None and not capture:
        raise ProgramError("--out requires a site to capture", "--capture")
    check_file(out, "--out")
    check_engine(engine)
    edits = [op for text in edit or () for op in under("--edit", edits_in, text)]
    captures = [under("--capture", read_capture, text) for text in capture or ()]
    options = read_options(option, dtype)
    with loaded(model, engine, options, prove=False) as lm:
        if bank is not None:
            under("--bank", lm.bank.load, bank)
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        made = lm.run(**asked, edits=Program.of(edits).edits, capture=captures, max_tokens=max_tokens,
                      temperature=temperature)  # fmt: skip
        OUT.print(Text(made.text), soft_wrap=True)
        if out is not None:
            captured = list(dict.fromkeys(ref for one in captures for ref in made.refs(one.at)))
            save_captures(made, captured, out)
            OUT.print(f"wrote {out}: {', '.join(captured)}", soft_wrap=True)
    for path in made.idle_edits:
        ERR.print(f"note: {path} acted on no token", soft_wrap=True)


def read_capture(text: str) -> Any:
    """Parse a site, or a site with the tokens to capture: z[5, 3] @ prompt[-1]."""
    from patchclamp.language.ops import as_capture

    try:
        return as_capture(text)
    except PatchclampError as error:
        raise type(error)(error.message) from None  # the option is its path


def save_captures(made: Any, captured: list[str], path: Path) -> None:
    """Write a run's rows at the `captured` sites to a safetensors file, with positions and tokens as metadata."""
    import torch
    from safetensors.torch import save_file

    texts = {"prompt_token_ids": made.prompt_token_ids, "token_ids": made.token_ids, "text": made.text,
             "positions": {site: made.positions(site) for site in captured}}  # fmt: skip
    tensors = {site: torch.as_tensor(made[site]).contiguous() for site in captured}
    save_file(tensors, path, {name: json.dumps(value) for name, value in texts.items()})


def push(
    url: Annotated[str, typer.Argument(help="The URL of a running `patchclamp serve`.")],
    name: Annotated[str, typer.Argument(help="The name by which requests with the same API key use it.")],
    file: Annotated[
        Path,
        typer.Argument(help="A vector or means (.safetensors, .npy; a vector also as .json), or a program (.json)."),
    ],
    api_key: Annotated[str | None, typer.Option(help="The API key; VLLM_API_KEY by default.")] = None,
) -> None:
    """Upload a vector or a program to a server."""
    from patchclamp.language import Program
    from patchclamp.store.named import NamedBank, numbers_of_json
    from patchclamp.studies.inputs import edits_in, lines_of

    bank = NamedBank()
    if file.suffix == ".json":
        text = "\n".join(under("FILE", lines_of, file)).lstrip()
        if text.startswith("[") and not text[1:].lstrip().startswith(("{", "]")):  # numbers, not ops
            bank[name] = under("FILE", numbers_of_json, text.encode())
        else:
            bank[name] = Program.of(under("FILE", edits_in, text))
    elif file.suffix == ".npy":
        bank[name] = read_array(file, "FILE")
    else:
        entries = NamedBank()
        if len(found := under("FILE", entries.load, file)) != 1:
            raise ProgramError(f"expected one vector, means or program, got {len(found)}: {', '.join(found)}", "FILE")
        bank[name] = entries[found[0]]
    bank.push(url, api_key=api_key)
    OUT.print(f"uploaded {name} to {url}", soft_wrap=True)


def harvest(
    model: Model,
    documents: Annotated[str, typer.Argument(help="A file: .txt (one document per line), .jsonl, .parquet; or a folder "
                                                  "saved by datasets.")],
    folder: Annotated[Path, typer.Argument(help="The parent of the data set's folder, which is named by a hash.")],
    site: Annotated[list[str], typer.Option(help="resid_post[12], 'z[5, 3]', …, or features as JSON; repeatable.")],
    column: Annotated[str | None, typer.Option(help="The field with the documents; text by default.")] = None,
    keep: Annotated[list[str] | None, typer.Option(help="A further field to copy into the index; repeatable.")] = None,
    store: Annotated[str, typer.Option(help="The dtype of the stored rows: bfloat16, float16, float32.")] = "bfloat16",
    no_bos: Annotated[bool, typer.Option("--no-bos", help="Leave out first tokens that are special.")] = False,
    no_special: Annotated[bool, typer.Option("--no-special", help="Leave out all special tokens.")] = False,
    positions: Annotated[list[str] | None, typer.Option(help="A window of positions: 4: or 0:128; repeatable.")] = None,
    only_token: Annotated[list[int] | None, typer.Option(help="Keep only this token id; repeatable.")] = None,
    not_token: Annotated[list[int] | None, typer.Option(help="Leave this token id out; repeatable.")] = None,
    norm_cap: Annotated[float | None, typer.Option(help="The largest norm to keep.")] = None,
    norm_times_median: Annotated[float | None, typer.Option(help="The same, in medians of the shard's norms.")] = None,
    project: Annotated[Path | None, typer.Option(help="W [K, D] in a .npy file: W h is stored.")] = None,
    sums: Annotated[bool, typer.Option("--sum", help="Store the sum over each document.")] = False,
    context: Annotated[int | None, typer.Option(help="Maximum tokens per prompt; the model's by default.")] = None,
    overlong: Annotated[str, typer.Option(help="Longer documents: refuse, cut or split.")] = "refuse",
    seed: Annotated[int, typer.Option(help="Seed of the shuffle.")] = 0,
    parts: Annotated[int | None, typer.Option(
        help="Number of separately shuffled parts; by default 8, of 256 MiB to 2 GiB.")] = None,
    shard: Annotated[str, typer.Option(metavar="I/N", help="This is machine I of N, from 0.")] = "0/1",
    shard_rows: Annotated[int, typer.Option(help="Rows per file.")] = 131_072,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens per batch.")] = None,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
) -> None:  # fmt: skip
    """Store activations of a data set on disk, shuffled. Run it again to resume after a stop."""
    from patchclamp.language.values import as_dtype
    from patchclamp.studies import Filters
    from patchclamp.studies import harvest as run_harvest

    filters = Filters(
        no_bos=no_bos, no_special=no_special, positions=read_windows(positions), only_tokens=tuple(only_token or ()),
        not_tokens=tuple(not_token or ()), norm_cap=norm_cap, norm_times_median=norm_times_median,
    )  # fmt: skip
    matrix = None if project is None else read_array(project, "--project")
    machine, options = read_shard(shard), read_options(option, dtype)
    check_engine(engine)
    sites = [under("--site", read_site, text) for text in site]
    under("--store", as_dtype, store)
    with loaded(model, engine, options) as lm:
        made = run_harvest(
            lm, documents, folder, sites=sites, column=column, keep=keep or (), dtype=store, filters=filters,
            project=matrix, sums=sums,
            context=context, overlong=overlong, seed=seed, parts=parts, shard=machine,
            shard_rows=shard_rows, batch_tokens=batch_tokens,
        )  # fmt: skip
    data = made.open()
    OUT.print(f"{made.folder}", soft_wrap=True)
    shards = f"{len(data.shards)} shard{'s' if len(data.shards) != 1 else ''}"
    OUT.print(f"{len(data)} rows of {made.what} in {shards}", soft_wrap=True)
    if not made.complete:
        OUT.print(f"{len(data.missing)} shards belong to other machines")


def read_site(text: str) -> Any:
    """Parse a site, or features of an attached SAE: {"type": "features", "name": "s10", "top": 8}."""
    from patchclamp.language import Program
    from patchclamp.language.site import parse_site

    if not text.lstrip().startswith("{"):
        return parse_site(text)
    return Program.from_json(f'{{"capture": [{text}]}}').capture[0]


def read_windows(texts: Sequence[str] | None) -> tuple[tuple[int | None, int | None], ...]:
    """Parse windows of positions: 4:, 0:128, -8:."""
    windows = []
    for text in texts or ():
        ends = re.fullmatch(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*", text)
        if ends is None:
            raise ProgramError(f"expected a window of positions such as 4: or 0:128, got {text!r}", "--positions")
        windows.append(tuple(None if end is None else int(end) for end in ends.groups()))
    return tuple(windows)


def read_shard(text: str) -> tuple[int, int]:
    """Parse a shard I/N: its index, and the number of shards."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if numbers is None or not int(numbers[1]) < int(numbers[2]):
        raise ProgramError(f"expected I/N with 0 <= I < N, such as 0/4, got {text!r}", "--shard")
    return int(numbers[1]), int(numbers[2])


def parity(
    model: Model,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, on both engines.")] = "float32",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt's text; repeatable. Two by default.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest relative error of a row; 1e-4 by default for float32.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate and compare after each prompt.")] = 4,
    engine: Annotated[str, typer.Option("--engine", metavar="NAME", help="The engine to examine.")] = "vllm",
    against: Annotated[str, typer.Option(metavar="NAME", help="The engine to compare it with.")] = "transformers",
    option: Options = None,
    as_json: Json = False,
) -> None:
    """Capture every site of every layer on vLLM and on Transformers, edit at each, and show the differences.

    Options are those of vLLM. The exit status is 1 if any difference is out of tolerance.
    """
    from patchclamp.cli import show
    from patchclamp.studies import parity as compare
    from patchclamp.studies.parity import PROMPTS

    for name in (engine, against):
        check_engine(name)
    options = read_options(option)
    with quietly(), ERR.status("starting …") as status:
        result = compare(
            model, dtype=dtype, prompts=prompt or PROMPTS, tolerance=tolerance, max_tokens=max_tokens,
            engines=(against, engine), tell=status.update, **options,
        )  # fmt: skip
    if as_json:
        OUT.print_json(msgspec.json.encode(result.to_dict()).decode(), highlight=False)  # NaN becomes null
    else:
        show.parity(OUT, result)
    raise typer.Exit(0 if result.holds else 1)


def serve(model: Model, context: typer.Context) -> None:
    """Start vLLM's OpenAI server with patchclamp enabled. All `vllm serve` options are passed through.

    Ordinary clients see no difference; others add a `patchclamp` object to their requests.
    """
    from patchclamp.engines import resolve
    from patchclamp.engines.preflight import model_name
    from patchclamp.engines.vllm.server import run_server

    words = dict(itertools.pairwise([*context.args, ""]))
    given = {name.lstrip("-").replace("-", "_"): value if same else words[word] or word for word in context.args
             if word[:2] == "--" for name, same, value in [word.partition("=")]}  # fmt: skip
    options = context.args
    if model == "smollm2" and given.keys().isdisjoint(("served_model_name", "config")):
        options = [*options, "--served-model-name", model]  # instead of the path of its folder
    run_server(resolve(model_name(model), given), options)


serve.context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}


def sites(
    model: Model,
    engine: Engine = None,
    dtype: Dtype = None,
    option: Options = None,
    full: Annotated[bool, typer.Option("--full", help="Try an edit in every layer, not in three per site.")] = False,
    as_json: Json = False,
) -> None:
    """Prove every site of a model: shapes match, no-op writes change nothing, edits have an effect, sums hold.

    The exit status is 1 if a proof of a site in the model's table fails. In a model without a table, sites that cannot
    be proved are withdrawn.
    """
    from patchclamp.cli import show
    from patchclamp.proving import prove

    check_engine(engine)
    with loaded(model, engine, read_options(option, dtype), prove=False) as lm:
        with ERR.status("proving every site …"):
            proofs = prove(lm, full)
        (show.sites_json if as_json else show.sites)(OUT, lm, proofs)
        promised = lm.sites.family.tabled
    raise typer.Exit(1 if promised and not all(proof.holds for proof in proofs) else 0)


COMMANDS: tuple[Callable[..., None], ...] = (demo, doctor, export, harvest, parity, push, run, serve, sites)
