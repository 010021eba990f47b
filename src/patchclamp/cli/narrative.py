"""What the demo says while it works: what is asked, what is being done, how long it took."""

from __future__ import annotations

import importlib.util
import time

from rich.console import Console
from rich.text import Text


class Story:
    """Tells the steps of a demonstration; each that `begins` also `ends`, with its time."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = 0.0

    def choose_engine(self) -> str:
        """vLLM, or where it is not installed Transformers, and says so."""
        if importlib.util.find_spec("vllm") is not None:
            return "vllm"
        self._say("vLLM is not installed here, so this demo runs on Transformers instead: same programs, same numbers.")
        return "transformers"

    def explain(self, clean: str, corrupt: str, answer: str, foil: str) -> None:
        """The question and the method."""
        answer, foil = answer.strip(), foil.strip()
        self._say("Two prompts, alike but for their subject:\n")
        self._say(f"  clean    {clean}", "blue")
        self._say(f"  corrupt  {corrupt}\n", "dark_orange3")
        self._say(
            f"The first should go on with {answer}, the second with {foil}. The corrupt prompt is now run many times, "
            "each time with one activation (one site, layer and token) replaced by the clean run's. Where that brings "
            f"{answer} back, the model holds what tells the two apart. The number is the logit difference "
            f"{answer} − {foil}: above 0 the model prefers {answer}.\n"
        )

    def begins(self, what: str) -> None:
        self._say(f"{what} …", "bold")
        self._began = time.perf_counter()

    def ends(self, result: str) -> None:
        self._say(f"  {result}, in {time.perf_counter() - self._began:.1f} s")

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style))
