"""The command `patchclamp`. `app` makes a command of every study, from its fields; `commands` has the others; `show`
prints results. Heavy modules are imported inside commands, so that `patchclamp --help` answers quickly.
"""

from patchclamp.cli.app import main

__all__ = ["main"]
