"""What several runs of the check found, as one Markdown table."""

from __future__ import annotations

from typing import Any

MARKS = {True: "✓", False: "✗", None: "·"}


def table(files: list[dict[str, Any]]) -> str:
    """Rows are checks, columns modes and versions of vLLM; ✗ did not hold, · is a fact about stock vLLM."""
    columns = [(file["vllm"], part) for file in files for part in dict.fromkeys(c["mode"] for c in file["checks"])]
    cells: dict[str, dict[tuple[str, str], Any]] = {}
    for file in files:
        for check in file["checks"]:
            cells.setdefault(check["check"].strip(), {})[file["vllm"], check["mode"]] = check["holds"]
    shared = [(version, mode) for version, mode in columns if mode.endswith(("eager", "graphs"))]
    dates = ", ".join(dict.fromkeys(file["date"] for file in files))
    gpus = ", ".join(dict.fromkeys(file["gpu"] for file in files))
    lines = [f"# What holds on a GPU, {dates}", "", f"{gpus}. Weights are random, the shape Llama-3.1-8B's with 4 layers.",
             "", "| | " + " | ".join(f"{version} {mode}" for version, mode in shared) + " |", "|---" * (len(shared) + 1) + "|"]  # fmt: skip
    for check, found in cells.items():
        if any(column in found for column in shared):
            lines.append(f"| {check} | " + " | ".join(MARKS[found[c]] if c in found else "" for c in shared) + " |")
    lines += ["", "| beside | vLLM | holds |", "|---|---|---|"]
    for check, found in cells.items():
        lines += [f"| {mode}: {check} | {version} | {MARKS[held]} |" for (version, mode), held in found.items()
                  if (version, mode) not in shared]  # fmt: skip
    failed = sum(held is False for found in cells.values() for held in found.values())
    count = sum(len(found) for found in cells.values())
    return "\n".join([*lines, "", f"{count} entries, {failed} of which do not hold."]) + "\n"
