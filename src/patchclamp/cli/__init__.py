"""The command `patchclamp`. `app` makes a command for every study from its fields; `commands` has the others; `show`
prints results. Heavy modules are imported inside commands, so that `patchclamp --help` is fast.
"""

from patchclamp.cli.app import main

__all__ = ["main"]
