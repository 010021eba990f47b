"""vLLM's own compiler, which GPUs use, on a CPU: stock, or patchclamp with stock numerics or uniform ones, in a process
of its own; prints JSON.

On a CPU vLLM leaves its compiler (`VllmBackend`: a graph cut at attention, compiled piece by piece, saved ahead of time)
for plain torch.compile.  Here it is told not to, and its one pass that names CUDA kernels is left out.
"""

# ruff: noqa: E402

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_AOT_COMPILE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.without_torchvision import stand_ins

sys.modules.update(stand_ins())

from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationMode
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform

adapt = CpuPlatform.check_and_update_config.__func__


def leave_the_compiler(cls, config) -> None:
    before = config.compilation_config.mode
    adapt(cls, config)
    if before == CompilationMode.VLLM_COMPILE:
        compilation = config.compilation_config
        compilation.mode, compilation.backend, compilation.compile_sizes = before, "inductor", []


CpuPlatform.check_and_update_config = classmethod(leave_the_compiler)
FixFunctionalizationPass.__call__ = lambda self, graph: None
registry._run_in_subprocess = lambda look: look()  # what a model class is: see `inspected_here`

from vllm.compilation.counter import compilation_counter

kind, asked = sys.argv[1], json.loads(sys.argv[2])
options = {**asked["options"], "compilation_config": {"mode": 3, "cudagraph_mode": "NONE", "pass_config": {
    "fuse_norm_quant": False, "fuse_act_quant": False}}}  # fmt: skip
told = {}
if kind == "stock":
    from vllm import LLM, SamplingParams

    llm = LLM(asked["model"], **options)
    sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"], logprobs=0, ignore_eos=True, detokenize=False)
    made = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], sampling, use_tqdm=False)
    assert "patchclamp" not in sys.modules
    told["plain"] = [
        [list(o.token_ids), [table[i].logprob.hex() for table, i in zip(o.logprobs, o.token_ids, strict=True)]]
        for o in (output.outputs[0] for output in made)
    ]
elif kind == "graded":
    import patchclamp as pc
    from patchclamp.engines.vllm.compat import pieces

    begun, run = [], pieces.Pieces._run  # the layers at which passes over pieces begin

    def counted(self, args):
        begun.append(self._layer)
        return run(self, args)

    pieces.Pieces._run = counted
    with pc.LM(asked["model"], engine="vllm", prove=False, **options) as lm:
        seen = lm.run(asked["prompts"], capture=[pc.Site(name) for name in asked["sites"]], max_tokens=1)
        programs = [
            [[pc.Replace(pc.From(source, site), at=site, tokens=[position])] for layer in range(asked["layers"])
             for name in asked["sites"] for position in range(0, len(prompt), 3) for site in [pc.Site(name)[layer]]]
            for prompt, source in zip(asked["prompts"], reversed(seen), strict=True)
        ]  # fmt: skip

        def graded(most: int) -> dict:
            pieces.MAX_BYTES = most
            begun.clear()
            found = lm.grade(asked["prompts"], programs, score=[7, 9], kl=True, top=2)
            return {"route": [each.route for each in found], "logprobs": [each.logprobs.tolist() for each in found],
                    "kl": [each.kl.tolist() for each in found], "begun": list(begun)}  # fmt: skip

        told["every layer"], told["some layers"] = graded(pieces.MAX_BYTES), graded(asked["bytes"])
        runs = [lm.run([prompt] * len(of), edits=of, score=[7, 9], max_tokens=1)
                for prompt, of in zip(asked["prompts"], programs, strict=True)]  # fmt: skip
        told["requests"] = [[[each.scores[token] for token in (7, 9)] for each in of] for of in runs]
        torn = pieces.Pieces._run

        def broken(self, args):
            result = torn(self, args)
            return (result[0] * 2,) if isinstance(result, tuple) else result * 2

        pieces.Pieces._run = broken
        [made] = pieces._of_engine.values()
        made.usable = None
        told["unlike the whole"], told["usable"] = graded(asked["bytes"]), made.usable
else:
    import patchclamp as pc
    from patchclamp.engines.vllm.compat import variants as graphs
    from patchclamp.runtime import op

    class Counted(type(op._current)):
        """Counts how often a tap looks for a runtime at work."""

        looked = 0

        @property
        def runtime(self):
            Counted.looked += 1
            return self.__dict__.get("at work")

        @runtime.setter
        def runtime(self, value):
            self.__dict__["at work"] = value

    op._current = Counted()

    def bits(runs) -> list:
        return [[run.token_ids, [x.hex() for x in run.logprobs]] for run in runs]

    numerics = "uniform" if kind == "uniform" else "stock"
    with pc.LM(asked["model"], engine="vllm", prove=False, numerics=numerics, **options) as lm:
        width, greedy = (
            lm.model.d_model,
            {"max_tokens": asked["tokens"], "sampling": {"ignore_eos": True}, "logprobs": True},
        )
        Counted.looked = 0
        told["plain"] = bits(lm.run(asked["prompts"], **greedy))
        told["taps, idle"] = Counted.looked
        seen = lm.run(asked["prompts"], capture=[pc.resid_post], **greedy)
        told["captured"] = bits(seen)
        patches = [[pc.Replace(pc.From(run, pc.resid_post), at=pc.resid_post)] for run in seen]
        told["patched onto itself"] = bits(lm.run(asked["prompts"], edits=patches, **greedy))
        told["rows"] = [run[pc.resid_post[0]].tolist() for run in seen]
        every = [pc.Site(name) for name in asked["sites"]]
        edits = [pc.Add([0.25 * layer] * width, at=pc.resid_post[layer]) for layer in (1, 2)]
        edits += [pc.Scale(1.5, at=pc.mlp_out[1]), pc.Scale(0.5, at=pc.attn_in[2])]
        both = [lm.run(asked["prompts"][1], capture=every, edits=more, max_tokens=1) for more in ([], edits)]
        told["everywhere"] = [{str(ref): run[str(ref)].float().tolist() for ref in lm.sites.refs()
                               if ref.name in asked["sites"]} for run in both]  # fmt: skip
        noop = [pc.Add([0.0] * width, at=pc.resid_post[0])]
        told["nothing added"] = bits(lm.run(asked["prompts"], edits=noop, **greedy))
        steer = [pc.Add([0.5] * width, at=pc.resid_post[0])]
        told["steered"] = bits(lm.run(asked["prompts"], edits=steer, **greedy))
        Counted.looked = 0
        told["again"] = bits(lm.run(asked["prompts"], **greedy))
        told["taps, idle again"] = Counted.looked
        status = lm.engine.status()
        told["steps"] = {name: status[name] for name in ("steps_with_taps", "steps_without_taps")}
        graphs._step = SimpleNamespace(active=True, usable=None)
        lm.run(asked["prompts"], **greedy)
        told["taps, in the active variant"] = Counted.looked
told |= {name: getattr(compilation_counter, name) for name in (
    "num_graphs_seen", "num_aot_compiles", "num_aot_artifacts_saved", "num_aot_artifacts_loaded",
    "num_backend_compilations", "num_cache_entries_updated")}  # fmt: skip
print(json.dumps(told))
