"""The planner: binds programs to prompts, and plans each step of a batch. NumPy only.

Program       --bind, lower--> BoundProgram   per request: sites become points, selections become position ranges
BoundProgram  --admit------->  ProgramTable   records by slot and point; changes only when requests come and go
Batch         --make_plan--->  StepPlan       the slot of each row, and the buffer offsets of captured rows
"""

from patchclamp.plan.bind import Code, SourceRun, bind
from patchclamp.plan.bound import (
    ADD_NORMED,
    ALL,
    APPLY,
    BLEND,
    CAPTURE,
    DECIDE,
    LATCH,
    LINEAR,
    LOW_RANK,
    MATCH,
    NOISE,
    PROJECT,
    REMOVE,
    ROTATE,
    SPAN,
    STORE,
    TEST,
    WHEN,
    BoundOp,
    BoundProgram,
    PositionRange,
)
from patchclamp.plan.prompt import Prompt
from patchclamp.plan.step import Batch, StepPlan, make_plan
from patchclamp.plan.table import RECORD, ProgramTable

__all__ = [
    "ADD_NORMED", "ALL", "APPLY", "BLEND", "CAPTURE", "DECIDE", "LATCH", "LINEAR", "LOW_RANK", "MATCH", "NOISE",
    "PROJECT", "RECORD", "REMOVE", "ROTATE", "SPAN", "STORE", "TEST", "WHEN", "Batch", "BoundOp", "BoundProgram",
    "Code", "PositionRange", "ProgramTable", "Prompt", "SourceRun", "StepPlan", "bind", "make_plan",
]  # fmt: skip
