"""patchclamp without a program, in a process of its own as stock vLLM is: prints what `stock.py` prints."""

import json
import sys

import patchclamp as pc

asked = json.loads(sys.argv[1])
lm = pc.LM(asked["model"], engine="vllm", prove=False, **asked["options"])
runs = lm.run(list(asked["prompts"]), max_tokens=asked["max_tokens"])
lm.close()
print(json.dumps([[run.token_ids, [x.hex() for x in run.logprobs]] for run in runs]))
