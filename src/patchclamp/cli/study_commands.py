"""The command line: commands generated from the studies' fields, the other commands, and one-line errors.

An option takes its name from the field, its help text from the docstring, and its parser from `Arg`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.text import Text
from typer.core import TyperGroup

from patchclamp.cli import commands
from patchclamp.cli.commands import ERR, OUT, Dtype, Engine, Model, Options, flag_of, under
from patchclamp.errors import PatchclampError
from patchclamp.version import __version__

if TYPE_CHECKING:
    from patchclamp.studies import Study
    from patchclamp.studies.study import StudyField

Parameters = dict[str, tuple[Any, Any]]  # annotation and default, by name


@functools.cache
def studies_by_command() -> dict[str, type[Study]]:
    from patchclamp.studies import STUDIES

    return {study.command: study for study in STUDIES.values() if study.command}


def _given(kind: Any, text: str, default: Any = None, *names: str, **how: Any) -> tuple[Any, Any]:
    """Return the annotation and default of an option."""
    return Annotated[kind, typer.Option(*names, help=text, **how)], default


FILE = Path | None
SAVED: Parameters = {
    "save": _given(FILE, "Save the result in this file."),
    "png": _given(FILE, "Plot it to this file: png, pdf or svg, by extension."),
    "html": _given(FILE, "Write it as an interactive page into this file."),
    "top": _given(int, "Best cells to show.", 5, min=1),
}
LOADED: Parameters = {"engine": (Engine, None), "dtype": (Dtype, None), "option": (Options, None)}
RUN: Parameters = {  # arguments of `run` that are also options
    "resume": _given(FILE, "Append values to this file as they are computed, and continue from it."),
    "batch": _given(int | None, "Runs submitted at a time.", min=1),
    "on": _given(str | None, "Engine or server URL of the exact patches; transformers by default.", metavar="ENGINE"),
}
SOURCE: Parameters = {
    "bank": _given(FILE, "A safetensors file of vectors and means, for bank:NAME."),
    "mean_tokens": _given(str | None, "For mean:FILE: the tokens to average; all by default."),
    "mean_by_position": _given(bool, "For mean:FILE: one mean per position.", False, "--mean-by-position"),
    "draws": _given(int, "For resample:FILE: prompts drawn per cell.", 1, min=1),
}
PAIRS: Parameters = {
    "pairs": _given(
        FILE, "Instead of the prompts: a file with one object per line: clean, corrupt, answer, foil, positions."
    )
}
CONTRASTS: Parameters = {
    "pairs": _given(FILE, "Instead of the two files: one file with one object per line: positive, negative.")
}
STEER: Parameters = {
    "prompts": _given(FILE, "A file of prompts to steer: score --answer on them, and show texts, at several scales."),
    "scales": _given(list[float] | None, "Factor of the vector for --prompts; repeatable."),
    "gguf": _given(FILE, "Write the vectors of all layers for llama.cpp and repeng."),
}


def options_of(study: type[Study]) -> dict[str, Parameters]:
    """Return the options of a study's command, grouped by the code that reads them."""
    fields = study.fields()
    by_pair = "positive" in fields or ({"clean", "corrupt", "answer"} <= fields.keys() and "steps" not in fields)
    has_source = "source" in fields and "metric" in fields
    help_texts = (PAIR_HELP if by_pair else {}) | (SOURCE_HELP if has_source else {})
    if by_pair and has_source:
        help_texts |= {"positions": POSITIONS_HELP}
    return {
        "fields": {name: _option(field, by_pair, help_texts.get(name) or _help(field.doc, fields))
                   for name, field in fields.items() if field.arg.parse is not None},
        "pairs": {} if not by_pair else CONTRASTS if "positive" in fields else PAIRS,
        "source": SOURCE if has_source else {},
        "steer": STEER if study.command == "steer" else {},
        "run": {name: of for name, of in RUN.items() if name in study.options()},
        "loaded": LOADED if "on" not in study.options() else {n: of for n, of in LOADED.items() if n != "engine"},
        "saved": {name: of for name, of in SAVED.items() if name not in fields},
    }  # fmt: skip


PAIR_HELP = {  # where several pairs come from a file
    "clean": "Prompt whose activations are patched in.",
    "corrupt": "Prompt that is run with these activations.",
    "answer": "Expected answer of the clean prompt, with its leading space.",
    "positive": "Prompts that show the behaviour: a file, one per line.",
    "negative": "Prompts that do not show it: a file, one per line.",
}
SOURCE_HELP = {
    "source": "Values to write instead: zeros, bank:NAME, mean:FILE or resample:FILE with a file of prompts.",
    "mask": "Columns of a row to patch, such as 0:64,100; or bank:NAME, or FILE.npy with a weight for each column.",
}
POSITIONS_HELP = "Columns of the grid: selections such as -1 or span('Rome'); all aligned positions by default."


def _help(text: str, fields: dict[str, StudyField]) -> str:
    """Convert a docstring to help text, with option names in place of field names."""
    return re.sub("`([^`]*)`", lambda found: flag_of(fields[found[1]]) if found[1] in fields else found[1], text)


def _option(field: StudyField, by_pair: bool, text: str) -> tuple[Any, Any]:
    """Return the annotation and default of a field's option: repeatable, a number, a flag, or text."""
    from patchclamp.studies.study import REQUIRED

    arg, flag = field.arg, flag_of(field)
    optional = by_pair and field.name in PAIR_HELP
    kinds = [kind for kind in (field.type, *get_args(field.type)) if kind in (int, float, bool)]
    default = None if field.default is REQUIRED else field.default
    shown = default if isinstance(default, str) else False
    if arg.many:
        kind: Any = list[str]
        shown = ", ".join(map(str, default)) if isinstance(default, tuple) and default else False
    else:
        kind = kinds[0] if kinds and arg.parse is str else str
    if kind is bool:
        names = (flag, f"--no-{flag[2:]}") if default else (flag,)
        return Annotated[bool, typer.Option(*names, help=text, show_default=False)], default
    if field.default is REQUIRED and not optional:
        return Annotated[kind, typer.Option(flag, help=text)], inspect.Parameter.empty
    is_number = kind in (int, float)
    shown = default is not None if is_number else shown
    return Annotated[kind | None, typer.Option(flag, help=text, show_default=shown)], default if is_number else None


def command_of(name: str) -> Callable[..., None]:
    """Return the function of a study's command, with the signature that typer reads."""
    study = studies_by_command()[name]
    groups = options_of(study)

    def command(model: str, **given: Any) -> None:
        try:
            run_study(study, model, {group: {n: given[n] for n in names} for group, names in groups.items()})
        except PatchclampError as error:
            raise of_option(error, study) from error

    parameters = [inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Model)]
    for names in groups.values():
        parameters += [
            inspect.Parameter(one, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
            for one, (annotation, default) in names.items()
        ]
    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    text = (inspect.getdoc(study) or "").partition("\n\nRaises:")[0]
    paragraphs = _help(text, study.fields()).split("\n\n")
    command.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return command


def of_option(error: PatchclampError, study: type[Study]) -> PatchclampError:
    """Return the error with the option's name in place of the field's in its path: `--site[0]` for `sites[0]`."""
    name = re.match(r"\w*", error.path or "")[0]  # pyright: ignore[reportOptionalSubscript]
    field = study.fields().get(name)
    if field is None or field.arg.parse is None:
        return error
    return type(error)(error.message, flag_of(field) + (error.path or "").removeprefix(name))


def run_study(study: type[Study], model: str, given: dict[str, dict[str, Any]]) -> None:
    """Read the options, run the study on the model, and show the result. All checks that need no model come first."""
    from patchclamp.cli.show import show, show_texts, wrote
    from patchclamp.plots import check_targets
    from patchclamp.store.named import NamedBank
    from patchclamp.studies import strength_curve
    from patchclamp.studies.inputs import prompts_in
    from patchclamp.studies.steering import SCALES, steered_texts

    saved, run = given["saved"], {name: value for name, value in given["run"].items() if value is not None}
    options = commands.read_options(given["loaded"]["option"], given["loaded"]["dtype"])
    engine = given["loaded"].get("engine")
    commands.check_engine(engine)
    on, gguf = run.pop("on", None), given["steer"].get("gguf")
    if on is not None and "://" not in on:
        commands.check_engine(on, "--on")
    check_targets(saved["png"], saved["html"])
    commands.check_file(saved["save"], "--save")
    commands.check_file(gguf, "--gguf")
    bank = NamedBank()
    if given["source"].get("bank") is not None:
        under("--bank", bank.load, given["source"]["bank"])
    fields = commands.read_fields(study, given)
    config = study(**{name: value for name, value in fields.items() if not callable(value)})
    prompts = given["steer"].get("prompts")
    steered = None if prompts is None else under("--prompts", prompts_in, str(prompts))
    commands.check(config, given["steer"], drawn=saved["png"] is not None or saved["html"] is not None)
    asked: Any = config
    if steered is not None and not getattr(config, "held_out", 0):  # the answer applies only to the curve
        config = study(**{name: value for name, value in fields.items() if name not in ("answer", "foil")})
    here = options if on is None else {name: value for name, value in options.items() if name == "dtype"}
    with (
        commands.loaded(model, "transformers" if "on" in given["run"] else engine, here) as lm,
        commands.serving(on, model, lm, options) as exact,
    ):
        for name, entry in bank.items():
            lm.bank[name] = entry
        late = {name: value(lm, config) for name, value in fields.items() if callable(value)}  # need the model
        if late:
            config = study(**{name: value for name, value in fields.items() if name not in late}, **late)
        result = config.run(lm, **run, **({} if on is None else {"on": exact}))
        curve, resume = None, run.get("resume")
        texts: dict[float, str] = {}
        if steered is not None:
            resume = None if resume is None else resume.with_name(f"{resume.name}.curve")
            scales = sorted(given["steer"]["scales"] or SCALES)
            curve = strength_curve(
                lm, result, steered, asked.answer, asked.foil, scales=scales, chat=asked.chat, resume=resume
            )
            texts = steered_texts(lm, result, steered[0], scales, asked.chat)
    show(OUT, result, saved.get("top", 5))
    if curve is not None:
        show(OUT, curve, saved.get("top", 5))
        show_texts(OUT, curve.prompts[0], texts)
    if saved["save"] is not None:
        wrote(OUT, result.save(saved["save"]))
    for write, path in (((curve or result).plot, saved["png"]), ((curve or result).to_html, saved["html"])):
        if path is not None:
            wrote(OUT, write(path))
    if gguf is not None:
        wrote(OUT, result.to_gguf(gguf))


class Commands(TyperGroup):
    """The command group. It makes study commands on demand; errors are printed on one line and exit with status 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*super().list_commands(ctx), *studies_by_command()})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (own := super().get_command(ctx, cmd_name)) is not None or cmd_name not in studies_by_command():
            return own
        one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        one.command(cmd_name)(command_of(cmd_name))
        return typer.main.get_command(one)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PatchclampError as error:
            ERR.print(Text(f"error: {' '.join(str(error).split())}", style="red"), soft_wrap=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    name="patchclamp", cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
for function in commands.COMMANDS:
    app.command(function.__name__, context_settings=getattr(function, "context_settings", None))(function)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"patchclamp {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Record from, and intervene on, the internals of a language model while stock vLLM serves it."""


def main() -> None:
    """Entry point of the command."""
    app()
