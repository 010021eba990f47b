"""The command `patchclamp`: a file of `commands/` is one command. It asks the library and shows what it answered.

Heavy modules are imported inside commands, so that `patchclamp --help` answers at once.
"""

from patchclamp.cli.app import main

__all__ = ["main"]
