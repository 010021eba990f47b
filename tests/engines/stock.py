"""Stock vLLM, run by tests in a process without the plugin: prints tokens and logprobs (as hex floats) as JSON, of one
engine after the other, with the options of each.

Each engine is shut down before the next: vLLM keeps rotary embeddings by shape and dtype while an engine lives, and one
that an eager engine made calls another kernel than one that a compiled engine makes (vLLM 0.32, `_ROPE_DICT`).
"""

import gc
import json
import sys

from vllm import LLM, SamplingParams

request, answers = json.loads(sys.argv[1]), []
sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], logprobs=0)
for options in request["engines"]:
    llm = LLM(**options)
    outputs = [output.outputs[0] for output in llm.generate(list(request["prompts"]), sampling, use_tqdm=False)]
    answers.append(
        [
            [
                list(output.token_ids),
                [table[token].logprob.hex() for table, token in zip(output.logprobs, output.token_ids, strict=True)],
            ]
            for output in outputs
        ]
    )
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
assert "patchclamp" not in sys.modules, "the plugin was loaded into what should be stock vLLM"
print(json.dumps(answers))
