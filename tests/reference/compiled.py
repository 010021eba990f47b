"""The Triton kernel compiled for a GPU that need not be there: whether it compiles, and what a thread of it takes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from patchclamp.kernels import cuda

POINTERS = {
    "*i32": ("slot_of_row", "rank_of_row", "token_of_row", "row_of_sample", "rank_of_sample",
             "generation", "first", "bits_of_row", "latches", "records", "offset", "origin_of_row", "quantiles"),
    "*i64": ("position_of_row", "base", "stride"), "*fp32": ("bank", "gates_of_row"), "i64": ("kept", "bad"),
    "i32": ("hidden_stride", "residual_stride", "width", "point", "points", "phase", "turn"),
}  # fmt: skip
ANY = ("kept", "bad", "point", "points", "phase", "turn")  # of no known alignment


def ptx(kernel: Any, types: dict[str, str], block: int, capability: int) -> str:
    """What becomes of a kernel whose arguments have these types, and its `BLOCK` this size."""
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index("BLOCK"),): block}, {})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]


def resources(width: int, dtype: str, pair: bool, sampled: bool, capability: int, code: bool = False) -> dict[str, int]:
    """Registers and bytes of stack (spills) of a thread of the kernel, as `cuda.site` launches it."""
    made = cuda.launched(width, pair, sampled)
    options = {name: made.pop(name) for name in ("num_warps", "maxnreg", "enable_fp_fusion")}
    constants = {**made, "EARLY": capability >= 90, "CODE": code}
    types = {name: kind for kind, names in POINTERS.items() for name in names} | dict.fromkeys(
        ("hidden", "residual"), f"*{dtype}"
    )
    names = cuda._site.arg_names
    source = ASTSource(
        cuda._site, {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types and name not in ANY},
    )  # fmt: skip
    options |= {"launch_pdl": True} if capability >= 90 else {}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(re.findall(rf"\b{name}:(\d+)", told)[-1]) for name in ("REG", "STACK")}
