"""`python -m patchclamp`: the command line, for when the script is not on the PATH."""

from patchclamp.cli import main

main()
