"""The command `patchclamp`: `study_commands` makes a command for every study, `commands` has the others, `show` prints
results. Heavy modules are imported inside commands, so that `patchclamp --help` is fast.
"""

from patchclamp.cli.study_commands import main

__all__ = ["main"]
