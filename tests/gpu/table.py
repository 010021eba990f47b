"""What several runs of the check found, as one Markdown table."""

from __future__ import annotations

from typing import Any

MARKS = {True: "✓", False: "✗", None: "·"}


def _cut_off(checks: list[dict[str, Any]]) -> bool:
    """Whether nothing is wrong with a part but that it had no time to end."""
    return [check["check"] for check in checks if check["holds"] is False] == ["had time to end"]


def table(files: list[dict[str, Any]]) -> str:
    """Rows are checks, columns modes and versions of vLLM; ✗ did not hold, · is a fact about stock vLLM.

    Of a part that several files have the last one counts, unless it was cut off.
    """
    parts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    cut_off: list[str] = []
    for file in files:
        new: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for check in file["checks"]:
            new.setdefault((file["vllm"], check["mode"]), []).append(check)
        for part, found in new.items():
            if part in parts and _cut_off(found):
                cut_off.append(f"- {' '.join(part)}, {file['date']}: {found[-1]['found']}")
            else:
                parts[part] = found
    cells: dict[str, dict[tuple[str, str], Any]] = {}
    for part, checks in parts.items():
        for check in checks:
            cells.setdefault(check["check"].strip(), {})[part] = check["holds"]
    shared = [(version, mode) for version, mode in parts if mode.endswith(("eager", "graphs"))]
    dates = ", ".join(dict.fromkeys(file["date"] for file in files))
    gpus = ", ".join(dict.fromkeys(file["gpu"] for file in files))
    small = any(mode.startswith(("parity", "poison")) for _, mode in parts)
    shapes = "the shape Llama-3.1-8B's with 4 layers" + ("; of parity and poison SmolLM2-135M's" if small else "")
    lines = [f"# What holds on a GPU, {dates}", "", f"{gpus}. Weights are random, {shapes}.",
             "", "| | " + " | ".join(f"{version} {mode}" for version, mode in shared) + " |", "|---" * (len(shared) + 1) + "|"]  # fmt: skip
    for check, found in cells.items():
        if any(column in found for column in shared):
            lines.append(f"| {check} | " + " | ".join(MARKS[found[c]] if c in found else "" for c in shared) + " |")
    versions = sorted({version for version, _ in parts})
    lines += ["", f"| beside | {' | '.join(versions)} |", "|---" * (len(versions) + 1) + "|"]
    for mode in dict.fromkeys(mode for version, mode in parts if (version, mode) not in shared):
        for check, found in cells.items():
            held = [MARKS[found[version, mode]] if (version, mode) in found else "" for version in versions]
            lines += [f"| {mode}: {check} | {' | '.join(held)} |"] if any(held) else []
    failed = sum(held is False for found in cells.values() for held in found.values())
    count = sum(len(found) for found in cells.values())
    lines += ["", f"{count} entries, {failed} of which do not hold{':' if failed else '.'}"]
    lines += [
        f"- {version} {mode}: {check['check'].strip()}: {check['found']}"
        for (version, mode), checks in parts.items() for check in checks if check["holds"] is False
    ]  # fmt: skip
    if cut_off:
        lines += ["", "Not counted, for another run stands above: had no time to end", *cut_off]
    return "\n".join(lines) + "\n"
