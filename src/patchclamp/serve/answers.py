"""What our routes answer, as pydantic models: they stand in the server's OpenAPI page."""

from __future__ import annotations

from pydantic import BaseModel, Field


class VectorCard(BaseModel):
    """A vector that is kept: [D], [n, D], or means, which have a site for each row."""

    name: str
    shape: list[int] = Field(examples=[[576]])
    bytes: int = Field(description="room that it takes of the key's `named_bytes`")
    sites: list[str] | None = Field(description="of means, the site of each row; null of a vector")


class VectorList(BaseModel):
    """The vectors of an API key."""

    vectors: list[VectorCard]
    named_bytes: int = Field(description="bytes of this key's vectors and programs")
    limit_bytes: int = Field(description="bytes that they may take")


class ProgramCard(BaseModel):
    """A program that is kept."""

    name: str
    edits: int = Field(description="how many it has")
    bytes: int = Field(description="room that it takes of the key's `named_bytes`")
    fingerprint: str = Field(description="SHA-256 of its content")
    model: str = Field(description="the model that it is served as", examples=["smollm2:calm"])


class ProgramList(BaseModel):
    """The programs of an API key."""

    programs: list[ProgramCard]


class Deleted(BaseModel):
    """What was deleted."""

    deleted: str


class RunCard(BaseModel):
    """A run that is kept."""

    run: str
    prompt_token_ids: list[int]
    token_ids: list[int] = Field(description="that it generated")
    text: str = Field(description="of these")
    captures: list[str] = Field(description="names of the tensors in its file", examples=[["resid_post[3]"]])
    captured_bytes: int
    fingerprint: str = Field(description="SHA-256 of its program's content")


class RunList(BaseModel):
    """The runs of an API key."""

    runs: list[RunCard]


class ErrorDetail(BaseModel):
    message: str
    type: str = Field(description="the class of the error", examples=["ShapeError"])
    param: str | None = Field(description="the place in the request that it speaks of", examples=["edits[0].at"])
    code: int = Field(description="the status", examples=[400])


class Problem(BaseModel):
    """An error, in OpenAI's shape."""

    error: ErrorDetail


class ServedModel(BaseModel):
    """What is served."""

    patchclamp: str = Field(description="its version")
    vllm: str = Field(description="its version")
    model: str
    family: str = Field(description="the name of its site table")
    layers: int
    d_model: int
    d_vocab: int
    dtype: str
    max_model_len: int
    limits: dict[str, float | None] = Field(description="what one caller may ask for and leave here")


class SiteCard(BaseModel):
    """A site word."""

    name: str = Field(examples=["resid_post"])
    shape: str = Field(examples=["[T, D]"])
    meaning: str
    layers: list[int] | None = Field(description="that have it; none of a site that the model has once")
    why_not: str | None = Field(description="why this model does not have it")


class SiteList(BaseModel):
    sites: list[SiteCard]
