"""`AttentionMaps`: a grid of token-to-token heatmaps, and the prompt as text. Hovering over a token shows which tokens
it attends to.

G maps · Q queries · K keys, which are the tokens of the text
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from patchclamp.plots import style
from patchclamp.plots.style import BLANK, DIVERGING, LABEL, MUTED, SEQUENTIAL, number, shorten, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from plotly.graph_objects import Figure as Interactive

MAX_PANELS = 64  # heatmaps in a picture; the text view lists all maps
LONGEST_LABEL = 14  # characters


class AttentionMaps(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Attention maps [G, Q, K] with `names`, from the tokens at positions `queries` to all `tokens`.

    signed: True for values of both signs, shown in two colours; False for values of at least 0
    """

    title: str
    explained: str
    provenance: str
    tokens: tuple[str, ...]
    queries: tuple[int, ...]
    names: tuple[str, ...]
    maps: np.ndarray
    signed: bool = False

    @property
    def _scale(self) -> tuple[tuple[str, ...], float, float]:
        """The colours of the scale, and its lower and upper limits."""
        high = float(np.abs(self.maps).max(initial=0.0)) or 1.0
        return (DIVERGING, -high, high) if self.signed else (SEQUENTIAL, 0.0, high)

    @property
    def _grid(self) -> tuple[int, int, int]:
        """The numbers of panels, columns and rows; the layout minimises empty cells, then prefers a ratio near 3:2."""
        count = min(len(self.names), MAX_PANELS)
        across = min(range(min(count, 3), 9), key=lambda n: (-count % n, abs(n - math.sqrt(1.5 * count))))
        return count, across, math.ceil(count / across)

    def draw(self) -> Figure:
        """Draw the heatmaps, first query at the top. A single map is labelled with tokens, several with positions."""
        (count, across, down), (colours, low, high) = self._grid, self._scale
        keys = [shorten(visible(token), LONGEST_LABEL) for token in self.tokens]
        width, height = 1.7, max(1.7 * len(self.queries) / len(keys), 0.5)
        if count == 1:
            width, height = min(max(0.26 * len(keys), 4.5), 12.0), min(max(0.22 * len(self.queries), 1.0), 10.0)
        notes = [self.explained, f"Ran on {self.provenance}."]
        if len(self.names) > count:
            notes.insert(1, f"The first {count} of {len(self.names)} maps.")
        figure = style.new_figure(self.title, notes, max(across * width + 1.6, 6.4), down * (height + 0.35) + 0.8)
        grid = figure.subplots(down, across, squeeze=False)
        scale = {"vmin": low, "vmax": high, "cmap": style.colour_map(colours, BLANK)}
        for n, axes in enumerate(grid.flat):
            if n >= count:
                axes.set_axis_off()
                continue
            first, last = n % across == 0, n // across == down - 1
            style.bare(axes, self.names[n], "key" * last, "query" * first)
            axes.imshow(self.maps[n], aspect="auto", interpolation="nearest", **scale)
            queries = [keys[query] if count == 1 else str(query) for query in self.queries]
            style.label_rows(axes, queries, height / len(queries))
            if count == 1:
                style.label_columns(axes, keys, width / len(keys))
            else:
                axes.set_xticks(range(0, len(keys), math.ceil(0.3 * len(keys) / width)))
            axes.tick_params(length=0, labelbottom=last, labelleft=first)
        of, ends = grid.flat[0].images[0], [low, high]
        bar = figure.colorbar(of, ax=grid.ravel().tolist(), pad=0.01, aspect=30, fraction=0.04, ticks=ends)
        bar.ax.set_yticklabels([number(low), number(high)], fontsize=LABEL - 1)
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
        return figure

    def figure(self) -> Interactive:
        """Return the heatmaps as a plotly figure, with positions and values on hover."""
        (count, across, down), (colours, low, high) = self._grid, self._scale
        side = min(1100 // across, 360) * len(self.queries) // len(self.tokens)
        height = 140 + (min(20 * len(self.queries), 1000) if count == 1 else down * (34 + side))
        figure = style.need("plotly.express").imshow(
            self.maps[:count].astype(np.float32), y=list(self.queries), facet_col=0, facet_col_wrap=across, zmin=low,
            zmax=high, aspect="auto", color_continuous_scale=colours, facet_col_spacing=0.02,
            facet_row_spacing=30 / height, labels={"x": "key", "y": "query", "color": ""},
        )  # fmt: skip
        figure.update_traces(hovertemplate="query %{y} → key %{x}: %{z:.3g}<extra></extra>")
        figure.for_each_annotation(lambda text: text.update(text=self.names[int(text.text.partition("=")[2])]))
        if count == 1:
            labels = [style.html_text(shorten(visible(token), LONGEST_LABEL)) for token in self.tokens]
            for update, at in (figure.update_xaxes, range(len(labels))), (figure.update_yaxes, self.queries):
                some = list(at[:: math.ceil(len(at) / 60)])
                update(tickvals=some, ticktext=[labels[position] for position in some])
        return style.lay_out(figure, height)

    def sections(self) -> Iterator[tuple[str, str]]:
        """Yield the text view, and the meaning of the values."""
        yield "Text", self.text()
        yield "Values", f"<p>{escape(self.explained)}</p>"

    def text(self) -> str:
        """Return the prompt as HTML, with a menu of the maps. Hovering over a token shows its row or column of the
        chosen map; a click pins the token."""
        scales = np.abs(self.maps).max((1, 2), initial=0.0)
        levels = np.round(self.maps / np.where(scales > 0, scales, 1.0)[:, None, None] * 32767).astype("<i2")
        shape = json.dumps({"queries": self.queries, "scales": scales.tolist()})
        choices = "".join(f"<option>{escape(name)}</option>" for name in self.names)
        tokens = " ".join(f"<span>{escape(visible(of))}</span>" + "<br>" * of.count("\n") for of in self.tokens)
        return (
            f'<style>{_STYLE}</style><div class="pc-attention" data-shape="{escape(shape)}" '
            f'data-maps="{base64.b64encode(levels.tobytes()).decode()}"><select>{choices}</select> '
            f'<label><input type="checkbox"> what attends to it</label><div>{tokens}</div><p></p></div>'
            f"<script>{_SCRIPT}</script>"
        )


_STYLE = f"""
.pc-attention div {{ line-height: 2; margin: .5rem 0 0; }} .pc-attention p {{ color: {MUTED}; min-height: 1.5em; }}
.pc-attention span {{ border-radius: 3px; padding: 2px 3px; cursor: pointer; white-space: pre; }}
.pc-attention .at {{ outline: 2px solid {MUTED}; }}
"""
# a notebook has several views in one document: each script starts the views that are not started yet
_SCRIPT = """
for (const view of document.querySelectorAll(".pc-attention:not([data-ready])")) {
  view.dataset.ready = "1";
  const {queries, scales} = JSON.parse(view.dataset.shape);
  const levels = new Int16Array(Uint8Array.from(atob(view.dataset.maps), c => c.charCodeAt(0)).buffer);
  const [choice, backwards, text, note] = ["select", "input", "div", "p"].map(name => view.querySelector(name));
  const tokens = [...text.querySelectorAll("span")];
  let kept = queries.at(-1);
  const show = at => {
    const map = choice.selectedIndex, row = queries.indexOf(at), high = scales[map] || 1;
    const level = (row, key) => row < 0 ? 0 : levels[(map * queries.length + row) * tokens.length + key] / 32767;
    const seen = tokens.map((_, i) => backwards.checked ? level(queries.indexOf(i), at) : level(row, i));
    tokens.forEach((token, i) => {
      const depth = Math.abs(seen[i]);
      token.style.background = `rgba(${seen[i] < 0 ? "179, 88, 6" : "8, 81, 156"}, ${depth.toFixed(3)})`;
      token.style.color = depth > 0.55 ? "white" : "";
      token.title = `${i}: ${(seen[i] * high).toFixed(3)}`;
      token.classList.toggle("at", i === at);
    });
    const best = [...seen.keys()].filter(i => seen[i]).sort((a, b) => Math.abs(seen[b]) - Math.abs(seen[a]));
    const said = best.slice(0, 5).map(i => `${tokens[i].textContent} ${(seen[i] * high).toFixed(3)}`).join(" \\u00b7 ");
    const arrow = backwards.checked ? "\\u2190" : "\\u2192";
    note.textContent = `${at}: ${tokens[at].textContent} ${arrow} ${said || "all zero"}`;
  };
  tokens.forEach((token, i) => {
    token.onmouseenter = () => show(i);
    token.onclick = () => show(kept = i);
  });
  text.onmouseleave = choice.onchange = backwards.onchange = () => show(kept);
  show(kept);
}
"""
