"""WHEN: a program bound to one prompt, and a batch of them, become a step plan. NumPy only.

Program --bind--> Bound (one request)      names become points, selections become pieces of positions
Bound   --admit-> ProgramTable             records by slot and point; changes only when requests come and go
Batch   --plan--> StepPlan                 which row belongs to which slot, where captured rows go
"""

from patchclamp.plan.bind import Bound, BoundOp, Source, bind
from patchclamp.plan.prompt import Prompt
from patchclamp.plan.step import Batch, StepPlan, make_plan
from patchclamp.plan.table import APPLY, BLEND, CAPTURE, LINEAR, MATCH, NOISE, PROJECT, RECORD, ProgramTable

__all__ = [
    "APPLY", "BLEND", "CAPTURE", "LINEAR", "MATCH", "NOISE", "PROJECT", "RECORD", "Batch", "Bound", "BoundOp",
    "ProgramTable", "Prompt", "Source", "StepPlan", "bind", "make_plan",
]  # fmt: skip
