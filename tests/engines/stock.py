"""Stock vLLM, run by tests in a process without the plugin: prints tokens and logprobs (as hex floats) as JSON."""

import json
import sys

from vllm import LLM, SamplingParams

asked = json.loads(sys.argv[1])
llm = LLM(asked["model"], **asked["options"])
sampling = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], logprobs=0)
made = llm.generate(list(asked["prompts"]), sampling, use_tqdm=False)
assert "patchclamp" not in sys.modules, "the plugin was loaded into what should be stock vLLM"
print(
    json.dumps(
        [
            [
                list(o.token_ids),
                [table[token].logprob.hex() for table, token in zip(o.logprobs, o.token_ids, strict=True)],
            ]
            for o in (output.outputs[0] for output in made)
        ]
    )
)
