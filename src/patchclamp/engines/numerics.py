"""Which code steps without programs run, on an engine that compiles.

uniform: the code of steps with programs, which has taps. Reading changes no bit of a run, and a capture that is written
    back where it came from changes none either.
stock: code compiled without taps, which is the engine's own to the last bit.

The two codes round differently in the last bits, where a compiler fuses what lies on both sides of a tap. `pc.LM` is
uniform by default, and a server stock.
"""

from __future__ import annotations

from patchclamp.errors import EngineError, unknown

NUMERICS = ("uniform", "stock")


def check(numerics: object) -> None:
    """Raises `UnknownName` for what is none of the two."""
    if numerics not in NUMERICS:
        raise unknown("numerics", str(numerics), NUMERICS, "numerics")


def only_uniform(numerics: str, engine: str) -> None:
    """Raises `EngineError` if an engine that runs the same code in every step is asked for anything else."""
    check(numerics)
    if numerics != "uniform":
        raise EngineError(
            f"{numerics!r} was asked for, and the {engine} engine runs the same code in every step: leave numerics out",
            "numerics",
        )
