"""Published numbers, where the weights they were measured on are at hand: PATCHCLAMP_GPT2 is a folder with GPT-2 small."""

import os

collect_ignore_glob = [] if os.environ.get("PATCHCLAMP_GPT2") else ["test_*.py"]
