"""WHEN: a program bound to one prompt, and a batch of them, become a step plan. NumPy only.

Program --bind--> BoundProgram (one request)      names become points, selections become pieces of positions
BoundProgram   --admit-> ProgramTable             records by slot and point; changes only when requests come and go
Batch   --plan--> StepPlan                 which row belongs to which slot, where captured rows go
"""

from patchclamp.plan.bind import BoundOp, BoundProgram, Source, bind
from patchclamp.plan.prompt import Prompt
from patchclamp.plan.step import Batch, StepPlan, make_plan
from patchclamp.plan.table import APPLY, BLEND, CAPTURE, LINEAR, MATCH, NOISE, PROJECT, RECORD, ProgramTable

__all__ = [
    "APPLY",
    "BLEND",
    "CAPTURE",
    "LINEAR",
    "MATCH",
    "NOISE",
    "PROJECT",
    "RECORD",
    "Batch",
    "BoundOp",
    "BoundProgram",
    "ProgramTable",
    "Prompt",
    "Source",
    "StepPlan",
    "bind",
    "make_plan",
]  # fmt: skip
