"""What edge attribution patching estimated, and what exact patches of its best edges gave.

R receivers · S senders
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from patchclamp.plots import GridPanel, TokenGrid, token_grid_html, token_grid_png, words
from patchclamp.studies.proposal import Proposal

if TYPE_CHECKING:
    import pandas

BEST = 20  # verified edges in the picture's table


class Edge(msgspec.Struct, frozen=True):
    """An edge: what one part writes into the stream, as another reads it."""

    sender: str
    receiver: str
    estimate: float
    exact: float | None


class EdgeAttribution(Proposal, frozen=True, eq=False, kw_only=True):
    """Arrays are [R, S], all positions together; NaN where a sender does not come before a receiver.

    senders: "resid_pre[0]", which is the embedding, "attn_out[0]", "mlp_out[0]", … · receivers: "attn_in[0]",
    "mlp_in[0]", …, "resid_post[L-1]", which is what the logits read
    """

    senders: tuple[str, ...]
    receivers: tuple[str, ...]

    def proposals(self, count: int = 10) -> list[Edge]:
        """The edges whose estimates are largest in size, largest first."""
        return [self._edge(number) for number in self.largest(count)]

    def best(self, count: int = 5) -> list[Edge]:
        """The verified edges that moved the metric furthest from corrupt towards clean, best first."""
        return [self._edge(number) for number in self.foremost(count)]

    def _edge(self, number: int) -> Edge:
        r, s = divmod(number, len(self.senders))
        exact = float(self.exact[r, s])
        return Edge(
            self.senders[s], self.receivers[r], float(self.estimates[r, s]), None if np.isnan(exact) else exact
        )  # fmt: skip

    def to_frame(self) -> pandas.DataFrame:
        """One row an edge: sender, receiver, estimate and exact effect."""
        import pandas

        numbers = np.flatnonzero(np.isfinite(self.estimates)).tolist()
        return pandas.DataFrame([msgspec.structs.asdict(self._edge(number)) for number in numbers])

    def grid(self) -> TokenGrid:
        """The picture's numbers and texts: senders across, receivers up, verified edges outlined, and a table of
        these."""
        exact = [[None if np.isnan(value) else words.signed(float(value)) for value in row] for row in self.exact]
        rows = [(edge.sender, edge.receiver, words.signed(edge.estimate), words.signed(edge.exact or 0.0))
                for edge in self.best(BEST)]  # fmt: skip
        return TokenGrid(
            title=f"Edge attribution patching: {self._quantity()}",
            explained=(f"Each cell estimates, from {self._way()}, how far the corrupt run's "
                       f"{words.number(self.corrupt)} would move if the receiver read what the sender wrote "
                       f"in the clean run ({words.number(self.clean)}). {self._verified()}"),
            provenance=self._made_on(),
            table=(("sender", "receiver", "estimate", "exact patch"), *rows) if rows else (),
            panels=(GridPanel(
                name="effect of the edge", row_name="receiver", column_name="sender", rows=self.receivers,
                columns=self.senders, values=self.estimates, centre=0.0,
                outlined=tuple((int(r), int(s)) for r, s in np.argwhere(np.isfinite(self.exact))),
                notes=tuple(tuple("" if value is None else f"exact patch: {value}" for value in row) for row in exact),
            ),),
        )  # fmt: skip

    def plot(self, path: str | Path) -> Path:
        """Draws the estimates, verified edges outlined, into a PNG (or any format of matplotlib)."""
        return token_grid_png(self.grid(), path)

    def to_html(self, path: str | Path) -> Path:
        """Writes one self-contained page: the estimates, and the verified edges with both numbers."""
        return token_grid_html(self.grid(), path)

    def __repr__(self) -> str:
        edge = self.proposals(1)[0]
        return (f"<EdgeAttribution {int(np.isfinite(self.estimates).sum())} edges, largest {edge.estimate:+.3f} from "
                f"{edge.sender} to {edge.receiver}; r {self.pearson():.2f}>")  # fmt: skip
