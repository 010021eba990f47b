"""The commands gathered into one, and the single place where an error becomes a line and an exit status."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from patchclamp.cli.commands import COMMANDS
from patchclamp.cli.console import complain
from patchclamp.errors import PatchclampError
from patchclamp.version import __version__


class Commands(TyperGroup):
    """A group whose `PatchclampError`s, in arguments and in commands alike, are told in one line: exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PatchclampError as error:
            complain(error)
            raise typer.Exit(2) from None


app = typer.Typer(
    name="patchclamp", cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
for name, command in COMMANDS.items():
    app.command(name.replace("_", "-"), context_settings=getattr(command, "context_settings", None))(command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"patchclamp {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Record from, and intervene on, the internals of a language model while stock vLLM serves it."""


def main() -> None:
    """Entry point of the command."""
    app()
