"""Arguments of studies that are not what they should be, on the fake engine: an error with the argument's path."""

from __future__ import annotations

import numpy as np
import pytest

import patchclamp as pc
from patchclamp.studies.study import REQUIRED

LM = pc.LM("fake", prove=False)
IDS = [5, 6, 7]
STUDIES = {
    "ablation_sweep": {"prompt": IDS, "answer": 5, "metric": "logprob"},
    "adapter_features": {"sae": "name", "prompts": [IDS], "lora": "unused"},
    "attention_edges": {"prompt": IDS},
    "attention_rollout": {"prompt": IDS},
    "attribution_patching": {"clean": IDS, "corrupt": [5, 8, 7], "answer": 5},
    "causal_trace": {"prompt": IDS, "subject": 1, "answer": 5},
    "direct_attribution": {"prompt": IDS, "answer": 5},
    "edge_attribution": {"clean": IDS, "corrupt": [5, 8, 7], "answer": 5},
    "edge_sweep": {"prompt": IDS, "answer": 5, "metric": "logprob"},
    "evaluate": {"samples": [{"prompt": "a", "answer": "b"}]},
    "evaluate_sae": {"sae": "name", "prompts": [IDS]},
    "feature_attribution": {"sae": "name", "prompt": IDS, "answer": 5},
    "fit_lens": {"dataset": [IDS, [8, 9]], "steps": 1},
    "fit_probe": {"prompts": [IDS, [8, 9]], "labels": [0, 1]},
    "fuzz_sweep": {"prompts": [IDS], "strengths": [0.5]},
    "harvest": {"documents": [IDS], "folder": "unused", "sites": "embed"},
    "head_scores": {"length": 4},
    "logit_lens": {"prompt": IDS},
    "patch_sweep": {"clean": IDS, "corrupt": [5, 8, 7], "answer": 5, "metric": "logprob"},
    "patchscope": {"source": IDS, "target": IDS},
    "path_patch": {"clean": IDS, "corrupt": [5, 8, 7], "answer": 5, "metric": "logprob"},
    "search": {
        "space": pc.studies.Space(lambda x: None, {"x": [1]}),
        "objectives": pc.studies.KLDivergence(prompts=[IDS]),
    },
    "top_contexts": {"sae": "name", "documents": [IDS], "folder": "unused"},
    "steering_vectors": {"positive": [IDS, IDS], "negative": [IDS, IDS]},
    "strength_curve": {"vectors": None, "prompts": [IDS], "answer": 5},
}
RUN = LM.run(IDS, max_tokens=1)


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.parametrize(
    "wrong", ["transformers", None, 3, [1], {}, float("nan"), RUN], ids=lambda wrong: type(wrong).__name__
)
def test_what_is_no_lm_is_refused_by_every_study(study, wrong):
    with pytest.raises(pc.ProgramError) as caught:
        getattr(pc.studies, study)(wrong, **STUDIES[study])
    assert caught.value.path == "lm"


# the fake engine has no attention and no gradients, and `STUDIES` no files, SAEs or enough prompts for these
UNAVAILABLE = {
    "adapter_features", "attention_edges", "attention_rollout", "attribution_patching", "edge_attribution", "edge_sweep",
    "evaluate_sae", "feature_attribution", "fit_probe", "head_scores", "steering_vectors", "strength_curve", "top_contexts",
}  # fmt: skip


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_runs_with_its_required_arguments(study, tmp_path):
    required = {name: str(tmp_path / name) if name == "folder" else of for name, of in STUDIES[study].items()}
    try:
        result = getattr(pc.studies, study)(LM, **required)
    except pc.PatchclampError:
        assert study in UNAVAILABLE
    else:
        assert result.config.keys() == {"study", *required}
        assert study not in UNAVAILABLE


@pytest.mark.parametrize("kind", pc.studies.STUDIES.values())
def test_defaults_are_read_as_arguments_are(kind):
    given = {"samples": STUDIES["evaluate"]["samples"], **STUDIES["search"], "labels": [0, 1], "sae": "name", "lora": "a",
             "answer": 5, "subject": 1}  # fmt: skip
    required = {name: given.get(name, IDS) for name, field in kind.fields().items() if field.default is REQUIRED}
    study = kind(**required)
    optional = {name: field.default for name, field in kind.fields().items() if name not in required}
    assert study.to_dict().keys() == {"study", *required}
    assert kind(**required, **optional) == study
    for name in optional:
        assert type(getattr(study, name)) is type(getattr(kind(**required, **optional), name))


@pytest.mark.parametrize(
    ("study", "wrong", "path"),
    [
        ("ablation_sweep", {"source": pc.studies.MeanOf("text")}, "source.prompts"),
        ("ablation_sweep", {"source": pc.studies.Resampled({"a": 1})}, "source.prompts"),
        ("ablation_sweep", {"layers": [True, 1.0]}, "layers"),
        ("ablation_sweep", {"layers": "1:99"}, "layers"),
        ("logit_lens", {"tokens": " Paris"}, "tokens"),
        ("logit_lens", {"layers": [True]}, "layers"),
        ("logit_lens", {"layers": [None]}, "layers"),
        ("logit_lens", {"translators": {1: np.full((16, 16), np.nan)}, "layers": 1}, "translators[1]"),
        ("logit_lens", {"translators": {1: np.eye(16)}, "layers": [1, 2]}, "translators"),
        ("patchscope", {"tokens": " Paris"}, "tokens"),
        ("patchscope", {"normed": "no"}, "normed"),
        ("fuzz_sweep", {"strengths": "12"}, "strengths"),
        ("fuzz_sweep", {"prompts": {"a": "b"}}, "prompts"),
        ("fuzz_sweep", {"prompts": [b"abc"]}, "prompts[0]"),
        ("attribution_patching", {"clean": [1.7, 2.9]}, "clean"),
        ("attribution_patching", {"clean": b"abc"}, "clean"),
        ("attribution_patching", {"corrupt": ["5", "6"]}, "corrupt"),
        ("harvest", {"filters": {"no_bos": True}}, "filters"),
    ],
)
def test_text_mappings_and_other_numbers_are_refused(study, wrong, path):
    with pytest.raises(pc.PatchclampError) as caught:
        getattr(pc.studies, study)(LM, **STUDIES[study] | wrong)
    assert caught.value.path == path


@pytest.mark.parametrize("wrong", [{1: [1.0], 1.5: [2.0]}, {"1": [1.0]}, {1: [float("nan")]}, {1: [0.0]}, {True: [1.0]},
                                   {1: "text"}, {1: None}, {1: [[1.0]]}, {}, None, [1.0]])  # fmt: skip
def test_directions_are_finite_vectors_by_whole_layers(wrong):
    with pytest.raises(pc.ProgramError):
        pc.studies.SteeringVectors.from_directions(wrong)


def test_directions_may_be_in_bfloat16():
    torch = pytest.importorskip("torch")
    made = pc.studies.SteeringVectors.from_directions({1: torch.ones(4, dtype=torch.bfloat16)})
    np.testing.assert_array_equal(made.vectors, np.ones((1, 4), np.float32))
