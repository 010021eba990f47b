"""The `patchclamp` command. `study_commands` makes a command for every study, `commands` has the others, and `show`
prints results. Heavy modules are imported inside commands to keep `patchclamp --help` fast.
"""

from patchclamp.cli.study_commands import main

__all__ = ["main"]
