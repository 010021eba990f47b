"""Evaluation packages, unchanged, against variants of a running server: lm-evaluation-harness and Inspect.

They run in an environment of their own, `.venv-evals` (`make evals`) or that of PATCHCLAMP_EVALS, since some of what they
need is newer than what vLLM takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import patchclamp as pc

from ..reference.hooks import PlainModel
from .conftest import KEYS
from .test_openai import STEERED

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("PATCHCLAMP_EVALS", ROOT / ".venv-evals")) / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} is missing: make evals installs lm-eval and inspect-ai"),
]
SAMPLES = [
    {"prompt": f"Question: which is a {kind}?\nAnswer:", "choices": choices, "answer": i % 3}
    for i, (kind, choices) in enumerate({
        "colour": [" red", " the number seven", " walking"], "city": [" hot", " Paris", " a blue whale"],
        "drink": [" stone", " seventy", " black tea"], "animal": [" dog", " Tuesday", " to swim"],
        "season": [" wood", " winter", " a glass of it"], "metal": [" soft", " song", " iron ore"],
    }.items())
]  # fmt: skip
TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
CHAT_TASK = """
task: tiny_chat
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: answer
generation_kwargs: {max_gen_toks: 5, temperature: 0, until: ["@@"]}
metric_list: [{metric: exact_match}]
"""
INSPECT_TASK = """
import json
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def colours():
    samples = [Sample(input="Name a colour.", target="red", metadata=each) for each in json.loads(%r)]
    return Task(samples, solver=generate(), scorer=includes(), config=GenerateConfig(max_tokens=6, temperature=0))
"""


HOOKED = """
import json, sys
sys.path.append(sys.argv[1])  # lm-eval and what it needs, after this environment's own packages
import lm_eval, torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

model, folder, layer, vector = sys.argv[2], sys.argv[3], int(sys.argv[4]), torch.tensor(json.loads(sys.argv[5]))
net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

def steer(module, args, output):
    return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector

net.model.layers[layer].register_forward_hook(steer)
found = lm_eval.simple_evaluate(
    HFLM(pretrained=net, tokenizer=AutoTokenizer.from_pretrained(model), batch_size=4, device="cpu"), tasks=["tiny"],
    task_manager=TaskManager(include_path=folder), bootstrap_iters=0,
)
print(json.dumps([{name: sample[name] for name in ("doc_id", "resps", "acc", "acc_norm")}
                  for sample in sorted(found["samples"]["tiny"], key=lambda sample: sample["doc_id"])]))
"""


EVALUATED = """
import functools, json, sys
sys.path.append(sys.argv[1])
import lm_eval, lm_eval.tasks, torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer
import patchclamp as pc

model, folder, layer, vector = sys.argv[2], sys.argv[3], int(sys.argv[4]), json.loads(sys.argv[5])
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_path=folder)
lm = pc.LM(model, engine="transformers", dtype="float32", device="cpu")
ours = pc.studies.evaluate(lm, "tiny", [None, pc.Add(vector, at=pc.resid_post[layer])], show_progress=False).values
net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

def steer(module, args, output):
    given = torch.tensor(vector)
    return (output[0] + given, *output[1:]) if isinstance(output, tuple) else output + given

net.model.layers[layer].register_forward_hook(steer)
found = lm_eval.simple_evaluate(
    HFLM(pretrained=net, tokenizer=AutoTokenizer.from_pretrained(model), batch_size=4, device="cpu"), tasks=["tiny"],
    task_manager=lm_eval.tasks.TaskManager(), bootstrap_iters=0,
)
theirs = sorted(found["samples"]["tiny"], key=lambda sample: sample["doc_id"])
print(json.dumps([ours.tolist(), [[one["acc"], one["acc_norm"], one["resps"][one["target"]][0][0]] for one in theirs]]))
"""


def run(server, folder: Path, *words: str) -> None:
    """Runs a module of the environment in a folder."""
    keys = dict.fromkeys(("OPENAI_API_KEY", "PATCHCLAMP_API_KEY"), KEYS[0])
    keys |= {"PATCHCLAMP_BASE_URL": f"{server.url}/v1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(
        [str(PYTHON), "-m", *words], env={**os.environ, **keys}, cwd=folder, capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def harness(server, folder: Path, name: str, text: str, model: str, *words: str) -> list[dict]:
    """The logged samples of a task under lm-evaluation-harness."""
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(map(json.dumps, SAMPLES)))
    (folder / f"{name}.yaml").write_text(text % data)
    run(server, folder, "lm_eval", "--tasks", name, "--include_path", str(folder), "--output_path", str(folder / "out"),
        "--log_samples", "--model", model, *words)  # fmt: skip
    [logged] = (folder / "out").rglob(f"samples_{name}_*.jsonl")
    found = [json.loads(line) for line in logged.read_text().splitlines()]
    return sorted(found, key=lambda sample: sample["doc_id"])


def hooked_logprob(plain: PlainModel, ids: list[int], rest: list[int]) -> float:
    """The log-probability of what follows a prompt, with `STEERED` as a plain hook."""
    vector = STEERED.scale * torch.tensor(STEERED.value.array())

    def steer(module, args, output):
        return (output[0] + vector, *output[1:]) if isinstance(output, tuple) else output + vector

    hook = plain.net.model.layers[STEERED.at.layers].register_forward_hook(steer)
    with torch.no_grad():
        logprobs_TV = plain.net(torch.tensor([ids + rest])).logits[0].log_softmax(-1)
    hook.remove()
    return float(logprobs_TV[range(len(ids) - 1, len(ids) + len(rest) - 1), rest].sum())


def test_the_harness_scores_a_variant_as_plain_hooks_do(server, local, calm, model, tmp_path):
    arguments = f"model={calm},base_url={server.url}/v1/completions,tokenizer={model},num_concurrent=2"
    logged = harness(server, tmp_path, "tiny", TASK, "local-completions", "--model_args", arguments)
    plain = PlainModel(model)
    ours = pc.studies.evaluate(local, SAMPLES, {"plain": None, "calm": [STEERED]}, show_progress=False)
    assert len(logged) == len(SAMPLES)
    for i, (sample, given) in enumerate(zip(logged, SAMPLES, strict=True)):
        found = [float(each[0][0]) for each in sample["resps"]]
        ids = local.tokens(given["prompt"])
        wanted = [
            hooked_logprob(plain, ids, local.tokens(given["prompt"] + text)[len(ids) :]) for text in given["choices"]
        ]
        assert found == pytest.approx(wanted, abs=1e-4)
        assert found[given["answer"]] == pytest.approx(ours.values[2, 1, i], abs=1e-4)
        assert [sample["acc"], sample["acc_norm"]] == ours.values[:2, 1, i].tolist()
    assert np.abs(ours.values[2, 1] - ours.values[2, 0]).min() > 0.01


def test_the_harness_scores_a_variant_as_its_own_model_with_the_same_hook(server, calm, model, tmp_path):
    """Sample by sample: the log-probabilities of choices, and both accuracies."""
    arguments = f"model={calm},base_url={server.url}/v1/completions,tokenizer={model},num_concurrent=2"
    logged = harness(server, tmp_path, "tiny", TASK, "local-completions", "--model_args", arguments)
    [packages] = PYTHON.parents[1].glob("lib/python*/site-packages")
    vector = (STEERED.scale * STEERED.value.array()).tolist()
    words = [str(packages), str(model), str(tmp_path), str(STEERED.at.layers), json.dumps(vector)]
    done = subprocess.run(
        [sys.executable, "-c", HOOKED, *words], cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert len(logged) == len(theirs) == len(SAMPLES)
    for ours, other in zip(logged, theirs, strict=True):
        assert [float(each[0][0]) for each in ours["resps"]] == pytest.approx(
            [each[0][0] for each in other["resps"]], abs=1e-4
        )
        assert (ours["acc"], ours["acc_norm"]) == (other["acc"], other["acc_norm"])


def test_a_task_by_name_is_scored_as_by_the_harness(model, tmp_path):
    """Its few-shot examples, delimiter and lengths; with a plain hook, sample by sample."""
    file = tmp_path / "tiny.jsonl"
    samples = [{**one, "choices": [text.strip() for text in one["choices"]]} for one in SAMPLES]
    file.write_text("\n".join(map(json.dumps, samples)))
    shots = 'num_fewshot: 2\nfewshot_split: test\ntarget_delimiter: " "'
    (tmp_path / "tiny.yaml").write_text((TASK % file).replace('target_delimiter: ""', shots))
    [packages] = PYTHON.parents[1].glob("lib/python*/site-packages")
    vector = json.dumps((STEERED.scale * STEERED.value.array()).tolist())
    done = subprocess.run(
        [sys.executable, "-c", EVALUATED, str(packages), str(model), str(tmp_path), str(STEERED.at.layers), vector],
        cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    ours, theirs = map(np.array, json.loads(done.stdout.splitlines()[-1]))
    assert ours[:2, 1].T.tolist() == theirs[:, :2].tolist()
    assert ours[2, 1] == pytest.approx(theirs[:, 2], abs=1e-4)
    assert np.abs(ours[2, 1] - ours[2, 0]).min() > 0.01


def test_the_harness_chats_with_a_variant(server, local, calm, tmp_path):
    arguments = f"model={calm},base_url={server.url}/v1/chat/completions,num_concurrent=1"
    words = ("--model_args", arguments, "--apply_chat_template", "--limit", "2")
    logged = harness(server, tmp_path, "tiny_chat", CHAT_TASK, "local-chat-completions", *words)
    for sample, given in zip(logged, SAMPLES[:2], strict=True):
        messages = [{"role": "user", "content": given["prompt"]}]
        assert sample["resps"] == [[local.run(messages=messages, max_tokens=5, edits=[STEERED]).text]]


def inspected(server, folder: Path, model: str, programs: list[pc.Program | None]) -> list[str]:
    metadata = [{} if each is None else {"patchclamp": json.loads(each.to_json())} for each in programs]
    (folder / "task.py").write_text(INSPECT_TASK % json.dumps(metadata))
    run(server, folder, "inspect_ai", "eval", "task.py", "--model", model, "--log-format", "json",
        "--log-dir", str(folder / "logs"), "--display", "none")  # fmt: skip
    [log] = (folder / "logs").glob("*.json")
    told = json.loads(log.read_text())
    assert told["status"] == "success"
    return [sample["output"]["choices"][0]["message"]["content"] for sample in told["samples"]]


@pytest.mark.parametrize("provider", ["patchclamp", "openai-api/patchclamp"])
def test_inspect_runs_a_variant(server, local, calm, tmp_path, provider):
    messages = [{"role": "user", "content": "Name a colour."}]
    [text] = inspected(server, tmp_path, f"{provider}/{calm}", [None])
    assert text == local.run(messages=messages, max_tokens=6, edits=[STEERED]).text
    assert text != local.run(messages=messages, max_tokens=6).text


def test_inspect_runs_samples_with_programs_of_their_own(server, local, tmp_path):
    messages = [{"role": "user", "content": "Name a colour."}]
    edits = [[], [STEERED], [pc.Scale(0.5, pc.mlp_out[2])]]
    programs = [pc.Program.of(each) if each else None for each in edits]
    texts = inspected(server, tmp_path, f"patchclamp/{server.model}", programs)
    assert texts == [local.run(messages=messages, max_tokens=6, edits=each).text for each in edits]
    assert texts[0] != texts[1]
