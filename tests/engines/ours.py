"""patchclamp without a program, in a process of its own as stock vLLM is: prints what `stock.py` prints."""

import json
import sys

import patchclamp as pc

asked, told = json.loads(sys.argv[1]), []
for options in asked["options"]:
    with pc.LM(asked["model"], engine="vllm", prove=False, **options) as lm:
        runs = lm.run(list(asked["prompts"]), max_tokens=asked["max_tokens"])
    told.append([[run.token_ids, [x.hex() for x in run.logprobs]] for run in runs])
print(json.dumps(told))
