"""Stock vLLM, run by tests in a process without the plugin: prints tokens and logprobs (as hex floats) as JSON, of one
engine after the other, with the options of each."""

import json
import sys

from vllm import LLM, SamplingParams

asked, told, kept = json.loads(sys.argv[1]), [], []
sampling = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], logprobs=0)
for options in asked["options"]:
    llm = LLM(asked["model"], **options)
    kept.append(llm)  # one that ends takes down what the next needs
    made = llm.generate(list(asked["prompts"]), sampling, use_tqdm=False)
    told.append(
        [
            [
                list(o.token_ids),
                [table[token].logprob.hex() for table, token in zip(o.logprobs, o.token_ids, strict=True)],
            ]
            for o in (output.outputs[0] for output in made)
        ]
    )
assert "patchclamp" not in sys.modules, "the plugin was loaded into what should be stock vLLM"
print(json.dumps(told))
