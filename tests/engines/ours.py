"""patchclamp without a program, in a process of its own as stock vLLM is: prints what `stock.py` prints."""

import json
import sys

import patchclamp as pc

request, answers = json.loads(sys.argv[1]), []
for options in request["engines"]:
    with pc.LM(engine="vllm", prove=False, numerics="stock", **options) as lm:
        runs = lm.run(list(request["prompts"]), max_tokens=request["max_tokens"], logprobs=True)
    answers.append([[run.token_ids, [x.hex() for x in run.logprobs]] for run in runs])
print(json.dumps(answers))
