"""Pydantic models and examples of requests and responses, for the server's OpenAPI page.

The models of ops are generated from the language's structs, so the page always matches them. Requests are parsed by the
language and not by these models, because its errors are more specific. `tests/serve/test_openapi.py` runs the examples.
"""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.json_schema import models_json_schema

from patchclamp.errors import PatchclampError
from patchclamp.language import Named, Site, Tokens, Vector
from patchclamp.language.conditions import ProbeCondition
from patchclamp.language.ops import OPS, Op, Translator
from patchclamp.language.values import Value


class VectorCard(BaseModel):
    """A stored vector [D] or [n, D], or stored means with a site for each row."""

    name: str
    shape: list[int] = Field(examples=[[576]])
    bytes: int = Field(description="bytes that count towards the key's `named_bytes`")
    sites: list[str] | None = Field(description="for means, the site of each row; null for a vector")


class VectorList(BaseModel):
    """The vectors of an API key."""

    vectors: list[VectorCard]
    named_bytes: int = Field(description="bytes of this key's vectors and programs")
    limit_bytes: int = Field(description="maximum of `named_bytes`")


class ProgramCard(BaseModel):
    """A stored program."""

    name: str
    edits: int = Field(description="number of edits")
    bytes: int = Field(description="bytes that count towards the key's `named_bytes`")
    fingerprint: str = Field(description="SHA-256 of the content")
    model: str = Field(description="the model name that serves it", examples=["smollm2:calm"])


class ProgramList(BaseModel):
    """The programs of an API key."""

    programs: list[ProgramCard]


class StudyCard(BaseModel):
    """A study and its request body."""

    name: str
    summary: str
    not_served: str | None = Field(description="why it is not supported on the server; null if it is")
    body: dict[str, Any] | None = Field(description="the JSON schema of its body")


class StudyList(BaseModel):
    """All studies."""

    studies: list[StudyCard]


class Deleted(BaseModel):
    """The name of a deleted object."""

    deleted: str


class RunCard(BaseModel):
    """A stored run."""

    run: str
    prompt_token_ids: list[int]
    token_ids: list[int] = Field(description="the generated token ids")
    text: str = Field(description="the generated text")
    captures: list[str] = Field(description="names of the tensors in its file", examples=[["resid_post[3]"]])
    captured_bytes: int
    fingerprint: str = Field(description="SHA-256 of its program's content")


class RunList(BaseModel):
    """The runs of an API key."""

    runs: list[RunCard]


class ErrorDetail(BaseModel):
    message: str
    type: str = Field(description="the class of the error", examples=["ShapeError"])
    param: str | None = Field(description="the location of the error in the request", examples=["edits[0].at"])
    code: int = Field(description="the HTTP status", examples=[400])


class Problem(BaseModel):
    """An error in OpenAI's format."""

    error: ErrorDetail


class ServedModel(BaseModel):
    """The served model, the versions and the limits."""

    patchclamp: str = Field(description="patchclamp's version")
    vllm: str = Field(description="vLLM's version")
    model: str
    family: str = Field(description="the name of its site table")
    layers: int
    d_model: int
    d_vocab: int
    dtype: str
    max_model_len: int
    no_lens: str | None = Field(description="why this model has no lens; null if it has one")
    limits: dict[str, int | float | None] = Field(description="the limits of one caller's requests and stored objects")


class SiteCard(BaseModel):
    """A site and its layers in the served model."""

    name: str = Field(examples=["resid_post"])
    shape: str = Field(examples=["[T, D]"])
    meaning: str
    layers: list[int] | None = Field(description="the layers that have it; null for a site without layers")
    why_not: str | None = Field(description="why this model does not have it")


class SiteList(BaseModel):
    sites: list[SiteCard]


Example = tuple[str, dict[str, Any]]  # the summary, and a body without its model
NOISE: dict[str, Any] = {"type": "noise", "at": "embed", "std": 0.2, "relative": True, "seed": 3}
SCALE: dict[str, Any] = {"type": "scale", "at": "attn_out[2]", "factor": 0.5, "tokens": "prompt[-1]"}
LAST = {"type": "capture", "at": "resid_post[2]", "tokens": "prompt[-1]"}
PATCH: dict[str, Any] = {
    "type": "replace", "at": "resid_post[2]", "tokens": "prompt[-1]",
    "value": {"type": "from", "run": "italy", "site": "resid_post[2]", "position": "prompt[-1]"},
}  # fmt: skip
FRANCE: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
ITALY: dict[str, Any] = {"prompt": "The capital of Italy is", "max_tokens": 1, "temperature": 0}
COLOUR: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Name a colour."}],
    "max_tokens": 4,
    "temperature": 0,
}

EXAMPLES: dict[str, dict[str, Example]] = {  # by path
    "/v1/completions": {
        "edit": ("An edit and a capture", {**FRANCE, "patchclamp": {"edits": [SCALE], "capture": [LAST]}}),
        "keep": ("A run that is kept under a name", {**ITALY, "patchclamp": {"capture": [LAST], "run": "italy"}}),
        "patch": ("An activation patch from that run", {**FRANCE, "patchclamp": {"edits": [PATCH]}}),
        "fuzz": ("Fuzzing, by scalars alone", {**FRANCE, "vllm_xargs": {"fuzz_strength": 0.2, "fuzz_seed": 3}}),
        "stream": ("A stream, which ends with the patchclamp object", {
            **FRANCE, "stream": True, "patchclamp": {"edits": [NOISE]}}),
    },
    "/v1/chat/completions": {
        "compare": ("A chat with noise, and the unedited answer", {
            **COLOUR, "patchclamp": {"edits": [NOISE], "compare": True}}),
    },
}  # fmt: skip
PROGRAM: dict[str, Any] = {"edits": [SCALE, NOISE]}
VECTOR = [0.25, -1.0, 0.5, 2.0]
EIFFEL = {"clean": "The Eiffel Tower is in", "corrupt": "The Colosseum is in", "answer": " Paris", "foil": " Rome"}
STUDIES: list[tuple[str, Any]] = [  # a study and its body
    ("patch_sweep", {**EIFFEL, "sites": ["resid_pre"], "layers": "0:4"}),
    ("patch_sweep", {"clean": ["The Eiffel Tower is in", "The Louvre is in"],
                     "corrupt": ["The Colosseum is in", "The Forum is in"], "answer": " Paris", "foil": " Rome",
                     "sites": ["z"], "group": 1, "layers": "2:4", "positions": {"end": "prompt[-1]"},
                     "source": {"type": "mean", "prompts": ["The Big Ben is in", "The Kremlin is in"],
                                "tokens": "prompt[-1]"}}),
    ("patch_sweep", {**EIFFEL, "zoom": 2, "resume": "eiffel"}),
    ("causal_trace", {"prompt": EIFFEL["clean"], "subject": "Eiffel Tower", "answer": " Paris", "layers": "0:2",
                      "seeds": 2}),
    ("logit_lens", {"prompt": EIFFEL["clean"], "layers": "0:4", "tokens": [" Paris"]}),
    ("fuzz_sweep", {"prompts": [EIFFEL["clean"]], "strengths": [0, 0.5], "max_tokens": 4}),
]  # fmt: skip


ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": Problem, "description": "The error and its location."}}
FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
        "description": "A safetensors file.",
    }
}
REFS = "#/components/schemas/{model}"
SiteText = Annotated[str, Field(description="a site", examples=["resid_post[3]", "z[5, 3]", "embed"])]
TokensText = Annotated[
    str,
    Field(
        description="the selected tokens",
        examples=["every", "prompt[-1]", "generated", 'span("Eiffel Tower")', 'role("user")[-1]', "image[0]"],
    ),
]


class Closed(BaseModel):
    """Base of models that reject unknown fields and do not coerce types."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


class VectorValue(Closed):
    """A vector [D] or vectors [n, D]."""

    type: Literal["vector"]
    shape: list[int] = Field(examples=[[576]])
    data: str = Field(description="little-endian fp32, row by row, in base64")


class NamedValue(Closed):
    """A vector, or means, stored for this API key."""

    type: Literal["named"]
    name: str = Field(examples=["calm"])


class FromValue(Closed):
    """Rows that another run captured."""

    type: Literal["from"]
    run: str = Field(description="name of that run", examples=["italy"])
    site: SiteText | None = Field(None, description="the site where they were captured; null: the edited site")
    position: TokensText | None = Field(None, description="positions in that run; null: the edited positions")


class SameRunValue(Closed):
    """Rows of an earlier layer of the run itself."""

    type: Literal["same_run"]
    site: SiteText
    position: TokensText | None = Field(None, description="positions; null: the edited positions")


class TranslatorValue(Closed):
    """An affine map h ↦ A h + b, applied to a layer's rows before a lens reads them."""

    layer: int
    matrix: VectorValue = Field(description="A [D, D]")
    bias: VectorValue | None = Field(None, description="b [D]")


Numbers = list[float] | list[list[float]]
TYPES: dict[Any, Any] = {  # the JSON types of op fields
    Site: SiteText,
    Tokens: TokensText,
    Value: Numbers | VectorValue | NamedValue | FromValue | SameRunValue,
    Vector | Named: Numbers | VectorValue | NamedValue,
    Vector: list[float] | VectorValue,
    ProbeCondition: dict[str, Any],
    tuple[Tokens, ...]: list[TokensText],
    tuple[Op, ...]: list[dict[str, Any]],
    tuple[Translator, ...]: list[TranslatorValue],
}
TYPES |= {kind | None: of | None for kind, of in TYPES.items()}


def _op_model(name: str, op: type[Op]) -> type[BaseModel]:
    """Create the pydantic model of an op; `name` is the value of its `type` field."""
    fields: dict[str, Any] = {"type": (Literal[name], ...)}
    for field in msgspec.structs.fields(op):
        default = ... if field.required else field.default
        is_json = default in (..., None) or isinstance(default, (int, float, str))
        fields[field.name] = TYPES.get(field.type, field.type), default if is_json else str(default)
    return create_model(f"{op.__name__}Op", __base__=Closed, __doc__=inspect.getdoc(op), **fields)


def _list_of(kind: Any) -> Any:
    return list[kind]


OP_MODELS = {name: _op_model(name, op) for name, op in OPS.items()}
READOUTS = functools.reduce(operator.or_, (OP_MODELS[kind] for kind in ("capture", "probe", "lens", "features")))
ANY_OP = Annotated[functools.reduce(operator.or_, OP_MODELS.values()), Field(discriminator="type")]
ProgramBody: type[Closed] = create_model(
    "ProgramBody", __base__=Closed, __doc__="The edits of a program, in order.", edits=(_list_of(ANY_OP), ...)
)
PatchclampRequest: type[Closed] = create_model(
    "PatchclampRequest",
    __base__=Closed,
    __doc__="The program of a request: edits in order, and captures, which record the values after all edits.",
    edits=(_list_of(ANY_OP), []),
    capture=(_list_of(READOUTS | SiteText), []),
    stop_when=(
        dict[str, Any] | None,
        Field(
            None,
            description="a condition on probes, as in an op of type when; each run ends at the first generated "
            "token that meets it",
        ),
    ),
    run=(str | None, Field(None, description="a name; the run is kept for later requests", examples=["italy"])),
    keep=(bool, Field(False, description="true: keep captures for later requests, as with a name")),
    tokens=(
        bool,
        Field(False, description="true: return each run's tokens as text, and where each edit acted"),
    ),
    compare=(bool, Field(False, description="true: also return the unedited answer; not supported with stream")),
)


class ProbeAnswer(BaseModel):
    """The result of a probe."""

    positions: list[int] = Field(description="positions of the tokens that were read")
    scores: list[Any] | None = Field(
        description="[tokens, k], or [k] if pooled (null if it selects no token), for each layer if there are several"
    )


class LensAnswer(BaseModel):
    """The likeliest tokens that a lens read at a site, best first, for each position."""

    positions: list[int] = Field(description="positions of the tokens that were read")
    ids: list[list[int]] = Field(description="[tokens, top]")
    tokens: list[list[str]] = Field(description="the tokens as text")
    logprobs: list[list[float | None]] = Field(description="log-probabilities; null if not finite")


class FeaturesAnswer(BaseModel):
    """An attached SAE's features at each position: the largest, in descending order, or the requested ones."""

    positions: list[int] = Field(description="positions of the tokens that were read")
    ids: list[list[int]] = Field(description="[tokens, k]")
    values: list[list[float | None]] = Field(description="[tokens, k]; 0 for an inactive feature")


class RunAnswer(BaseModel):
    """The run of one choice."""

    index: int = Field(description="index of the choice")
    run: str = Field(description="name of the run")
    idle_edits: list[str] = Field(description="edits that acted on no token, such as edits[0]")
    tokens: list[str] | None = Field(None, description="prompt and generated tokens as text, if `tokens` is set")
    acted: dict[str, list[tuple[int, int]]] | None = Field(
        None, description="by edit, half-open ranges of the positions where it acted, if `tokens` is set",
        examples=[{"edits[0]": [[4, 5]]}],
    )  # fmt: skip
    probes: dict[str, ProbeAnswer] | None = Field(
        None, description="probe results, by name; null if larger than inline_bytes"
    )
    lens: dict[str, LensAnswer] | None = Field(None, description="lens results, by site")
    features: dict[str, FeaturesAnswer] | None = Field(None, description="features of attached SAEs, by name")
    captures: str | None = Field(None, description="safetensors in base64; null if larger than inline_bytes")
    captures_url: str | None = Field(None, description="URL of the captures, if they are kept")


class VariantAnswer(BaseModel):
    name: str
    edits: int = Field(description="number of its edits, which come first and count in paths")


class PatchclampAnswer(BaseModel):
    """The results of a program. A response without it means that the server did not apply the program."""

    fingerprint: str = Field(description="SHA-256 of the program that was applied")
    runs: list[RunAnswer]
    variant: VariantAnswer | None = None
    unedited: dict[str, Any] | None = Field(
        None, description="the complete answer without the program, if `compare` is set"
    )


BODIES = (ProgramBody, PatchclampRequest, PatchclampAnswer)


def attach(app: FastAPI) -> None:
    """Add the `patchclamp` object, with examples, to an app's OpenAPI page."""
    stock = app.openapi

    @functools.wraps(stock)
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _extend(stock(), app.state.patchclamp.model_name)
        return stock()

    app.openapi = openapi


def _extend(page: dict[str, Any], model: str) -> None:
    """Add the models and examples to a page."""
    _, ours = models_json_schema([(body, "validation") for body in BODIES], ref_template=REFS)
    schemas = page.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(ours["$defs"])
    for path, examples in EXAMPLES.items():
        post = page["paths"][path]["post"]
        content = post["requestBody"]["content"]["application/json"]
        content["examples"] = {
            name: {"summary": summary, "value": {"model": model, **value}}
            for name, (summary, value) in examples.items()
        }
        reference = REFS.format(model=PatchclampRequest.__name__)
        schemas[content["schema"]["$ref"].rpartition("/")[2]]["properties"]["patchclamp"] = {"$ref": reference}
        answer = {"patchclamp": {"$ref": REFS.format(model=PatchclampAnswer.__name__)}}
        post["responses"]["200"]["content"]["application/json"] = {"schema": {"type": "object", "properties": answer}}


MAX_MESSAGE = 2000  # characters of an error message in a response; a message may quote the request


def error_object(error: PatchclampError) -> dict[str, Any]:
    """Return the body of an error response."""
    message, path = (_sendable(text) for text in (str(error), error.path or ""))
    return {"error": {"message": message, "type": type(error).__name__, "param": path or None, "code": error.status}}


def _sendable(text: str) -> str:
    """Return text as valid UTF-8, truncated to `MAX_MESSAGE` characters."""
    return text[:MAX_MESSAGE].encode(errors="backslashreplace").decode()
