"""`python -m patchclamp`: the command, where it is not on the path."""

from patchclamp.cli import main

main()
