"""The command `patchclamp`: one file a command, each of which asks the library and shows what it answered.

Heavy modules are imported inside commands, so that `patchclamp --help` answers at once.
"""

from patchclamp.cli.app import main

__all__ = ["main"]
