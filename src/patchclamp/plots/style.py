"""Code shared by all plots: colours, the formatting of numbers and tokens, and writing figures to files.

matplotlib draws files (PNG, SVG, PDF); plotly draws interactive pages. Tokens come from prompts and are never trusted:
invisible characters are spelled out, and text that enters a page is escaped.
"""

from __future__ import annotations

import functools
import importlib
import io
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol

from patchclamp.errors import PatchclampError, ProgramError, unknown
from patchclamp.language.values import as_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from plotly.graph_objects import Figure as Interactive

# Orange and blue are distinguishable with all common kinds of colour blindness, and both ends are equally dark.
# Source: ColorBrewer, the halves of PuOr and RdBu; Blues; lines: Okabe and Ito 2008, without yellow.
DIVERGING = (
    "#7f3b08", "#b35806", "#e08214", "#fdb863", "#fee0b6", "#f7f7f7",
    "#d1e5f0", "#92c5de", "#4393c3", "#2166ac", "#053061",
)  # fmt: skip
SEQUENTIAL = (
    "#f7fbff", "#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b",
)  # fmt: skip
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#1f2933")
INK, MUTED, RULE, BLANK, FAINT = "#1f2933", "#5f6b7a", "#d5dae1", "#e3e7ec", "#9aa4b1"
CLEAN, CORRUPT = "#1b5a9e", "#a04e06"
PALE = 0.55  # opacity of cells with only the value of their block

LABEL, TITLE = 8.5, 12  # points
DOTS_PER_INCH = 160
FONTS = (  # searched in this order for each glyph, if they are installed
    "DejaVu Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "Hiragino Sans", "Microsoft YaHei", "Arial Unicode MS",
    "Noto Sans Arabic", "Noto Sans Devanagari", "Noto Sans Symbols2", "Noto Emoji", "Segoe UI Symbol",
)  # fmt: skip
INCLUDES = ("directory", True, "cdn", False)  # locations of plotly's script for a page
PAGE_FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"

# -- text

_VISIBLE = {"\n": "↵", "\t": "⇥", "\r": "␍"}
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def visible(token: str) -> str:
    """Replace a token's line breaks, outer spaces, and invisible or direction-changing characters by visible ones."""
    return re.sub(r"^ | $| (?= )|(?<= ) ", "␣", plain(token)) or "∅"


def plain(text: str) -> str:
    """Replace invisible characters as `visible` does, but keep spaces: for running text."""
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    hidden = unicodedata.category(character)[0] in "CZ" and character != " "
    return _VISIBLE.get(character) or (f"⟨{ord(character):04X}⟩" if hidden else character)


def shorten(text: str, limit: int) -> str:
    """Truncate text to `limit` characters, including an ellipsis if it was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def quoted(token: str) -> str:
    return f"'{plain(token)}'"


def number(value: float) -> str:
    """Format a number with two decimals, with two significant digits if small, or with an exponent if tiny."""
    size = abs(value)
    if 0 < size < 1e-3:
        digits, power = f"{value:.1e}".split("e")
        return f"{digits.replace('-', '−')} × 10{str(int(power)).translate(_RAISED)}"
    text = f"{value:.2f}" if size >= 0.1 or size == 0 else f"{value:.2g}"
    return text.replace("-", "−")


def signed(value: float) -> str:
    return ("+" if value >= 0 else "") + number(value)


def percent(part: float | None) -> str:
    """Format a fraction as a percentage, with one decimal below 10 %; None as a dash."""
    if part is None:
        return "–"
    return f"{100 * part:z.{int(0 < abs(part) < 0.0995)}f} %".replace("-", "−")


def tick(value: float) -> str:
    """Format a number for an axis, with four significant digits."""
    text = f"{value:.4g}"
    return number(value) if "e" in text else text.replace("-", "−")


def positions(numbers: tuple[int, ...]) -> str:
    """Format positions as text: `3`, `3–5`, `3, 7`."""
    if len(numbers) > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}–{numbers[-1]}"
    return ", ".join(map(str, numbers))


def ran_on(model: str, engine: str, dtype: str) -> str:
    """Format model, engine and dtype. A local folder is shortened to its name, because plots are shared."""
    path = PurePath(model)
    return f"{path.name if path.is_absolute() else model} · {engine} · {dtype}"


# -- files


def need(module: str, package: str = "'patchclamp[plots]'") -> Any:
    """Import a module of an optional package. Raises `PatchclampError` that names the `package` to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise PatchclampError(f"{module.partition('.')[0]} is not installed: pip install {package}") from None


def picture_file(path: str | Path) -> tuple[Path, str]:
    """Return a picture's path, and the format that its extension names: png, pdf, svg, or another of matplotlib's."""
    path = Path(as_file(path, "path"))
    ending = path.suffix.removeprefix(".").lower()
    if ending not in (formats := need("matplotlib.backend_bases").FigureCanvasBase.get_supported_filetypes()):
        raise unknown("picture format", ending, sorted(formats), str(path))
    return check_target(path), ending


def page_file(path: str | Path) -> Path:
    """Return a page's path. Raises `UnknownName` unless it ends in .html or .htm."""
    path = Path(as_file(path, "path"))
    if path.suffix.lower() not in (".html", ".htm"):
        raise unknown("page format", path.suffix.removeprefix("."), ("html", "htm"), str(path))
    need("plotly")
    return check_target(path)


def check_targets(png: str | Path | None = None, html: str | Path | None = None) -> None:
    """Check the paths of the picture and the page before a study runs, so that writing does not fail at the end."""
    for path, check in ((png, picture_file), (html, page_file)):
        if path is not None:
            check(path)


def check_target(path: Path, option: str | None = None) -> Path:
    """Return the path of a file to write, and create its parent folder. Raises `ProgramError` if it is a folder."""
    if path.is_dir():
        raise ProgramError("expected a file, got a folder", option or str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProgramError(f"cannot create the folder for {path}: {error.strerror}", option or str(path)) from None
    return path


MAX_PIXELS = 65_000  # per side, which matplotlib limits to 2¹⁶


@contextmanager
def _writing(path: str | Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProgramError(f"cannot write the file: {error.strerror or error}", str(path)) from None


class Picture(Protocol):
    """The picture of a result: a `Heatmap`, a `TokenGrid`, `AttentionMaps`, `Curves` or a `Scatter`."""

    @property
    def title(self) -> str: ...
    @property
    def provenance(self) -> str: ...

    def figure(self) -> Interactive:
        """Return the picture as a plotly figure."""
        ...

    def draw(self) -> Figure:
        """Return the picture as a matplotlib figure."""
        ...

    def sections(self) -> Iterable[tuple[str, str]]:
        """Yield (heading, HTML) pairs for the sections below a page's figure."""
        ...


def save_picture(picture: Picture, path: str | Path | None) -> Any:
    """Draw a picture into a file with matplotlib, in the format of its extension. Without a path, return the image."""
    target, ending = (io.BytesIO(), "png") if path is None else picture_file(path)
    figure = picture.draw()
    _as_text(figure)
    dpi = min(figure.dpi, MAX_PIXELS / max(figure.get_size_inches()))
    with _writing(path):
        figure.savefig(target, format=ending, dpi=dpi, facecolor="white")
    return target if isinstance(target, Path) else need("IPython.display", "ipython").Image(target.getvalue())


def save_page(picture: Picture, path: str | Path | None, include_plotlyjs: bool | str = "directory") -> Any:
    """Write an interactive page as `StudyResult.to_html` does. Without a path, return the page."""
    if not isinstance(include_plotlyjs, (bool, str)) or include_plotlyjs not in INCLUDES:
        raise ProgramError(f"expected one of {INCLUDES}, got {include_plotlyjs!r:.80}", "include_plotlyjs")
    target = None if path is None else page_file(path)
    include_plotlyjs = include_plotlyjs if target or include_plotlyjs != "directory" else True
    plot = picture.figure().to_html(full_html=False, include_plotlyjs=include_plotlyjs, config={"displaylogo": False})
    sections = "".join(f"<h2>{escape(name)}</h2>\n{body}\n" for name, body in picture.sections())
    parts = (escape(picture.title), _STYLE, escape(picture.title), escape(picture.provenance), plot, sections)
    page = _PAGE.format(*parts)
    if target is None:
        return need("IPython.display", "ipython").HTML(page)
    with _writing(target):
        target.write_text(page, encoding="utf-8")
        if include_plotlyjs == "directory":
            script, code = target.with_name("plotly.min.js"), need("plotly.offline").get_plotlyjs().encode()
            if not script.exists() or script.read_bytes() != code:  # missing, or from another version of plotly
                script.write_bytes(code)
    return target


_STYLE = f"""
body {{ font: 15px/1.5 {PAGE_FONT}; color: {INK}; margin: 2rem auto; max-width: 1200px; padding: 0 1rem; }}
h1 {{ font-size: 1.35rem; margin-bottom: 0; }} h2 {{ font-size: 1.05rem; margin: 1.6rem 0 .4rem; }}
.made {{ color: {MUTED}; margin-top: .2rem; }} table {{ border-collapse: collapse; font-size: 14px; }}
td, th {{ padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid {RULE}; }}
.tokens {{ line-height: 1.4; }} .wide {{ overflow-x: auto; }} .plot {{ min-width: 960px; }}
.token {{ display: inline-block; background: {BLANK}; border-radius: 3px; padding: 1px 4px; margin: 0 3px 4px 0; }}
.token sub {{ color: {MUTED}; font-size: 10px; }}
.clean .differs {{ background: {CLEAN}; color: white; }} .corrupt .differs {{ background: {CORRUPT}; color: white; }}
.differs sub {{ color: white; }} .skipped {{ background: white; outline: 1px dashed {MUTED}; }}
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{}</title><style>{}</style></head><body>
<h1>{}</h1>
<p class="made">{}</p>
<div class="wide"><div class="plot">{}</div></div>
{}</body></html>
"""


def table(rows: Iterable[Iterable[str]], heads: Iterable[str]) -> str:
    """Return rows of text as an HTML table."""
    top = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def chips(tokens: Iterable[str], marks: Iterable[str]) -> str:
    """Return tokens with their positions as HTML. `marks`: a CSS class for each token."""
    return '<div class="tokens">' + "".join(
        f'<span class="token {mark}">{escape(visible(token))}<sub>{position}</sub></span>'
        for position, (token, mark) in enumerate(zip(tokens, marks, strict=True))
    ) + "</div>"  # fmt: skip


# -- matplotlib


@functools.cache
def fonts() -> list[str]:
    """Return the installed families of `FONTS`."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return [name for name in FONTS if name in installed] or ["sans-serif"]


def new_figure(title: str, notes: Iterable[str], width: float, height: float) -> Figure:
    """Create a figure of a size in inches, with a title, and notes below. pyplot is not used: it is not thread-safe."""
    from matplotlib.figure import Figure

    titles = _wrapped([title], width - 0.5, fontsize=TITLE, weight="bold")
    below = _wrapped(notes, width - 0.5, fontsize=LABEL - 0.5)
    height += 0.24 * len(titles) + 0.17 * len(below) + 0.35
    figure = Figure(figsize=(width, height), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1, hspace=0.04, wspace=0.03)  # pyright: ignore
    figure.suptitle("\n".join(titles), x=0.02, ha="left", fontsize=TITLE, weight="bold", color=INK)
    if below:
        figure.supxlabel("\n".join(below), x=0.02, ha="left", fontsize=LABEL - 0.5, color=MUTED)
    return figure


def _wrapped(paragraphs: Iterable[str], width: float, **how: Any) -> list[str]:
    """Wrap text into lines of at most `width` inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ruler = Figure(dpi=72)
    text = ruler.text(0, 0, "", family=fonts(), parse_math=False, **how)
    renderer = FigureCanvasAgg(ruler).get_renderer()

    def inches(line: str) -> float:
        text.set_text(line)
        return text.get_window_extent(renderer).width / 72

    lines = []
    for paragraph in paragraphs:
        per_line = max(int(len(paragraph) * width / max(inches(paragraph), 1e-6)), 1)
        while any(inches(line) > width for line in textwrap.wrap(paragraph, per_line)) and per_line > 8:
            per_line = int(per_line * 0.9)
        lines += textwrap.wrap(paragraph, per_line)
    return lines


def bare(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Set title and small labels, and hide the spines."""
    axes.set_title(title, loc="left", fontsize=10, weight="bold", color=INK)
    axes.set_xlabel(x_label, fontsize=LABEL, color=MUTED)
    axes.set_ylabel(y_label, fontsize=LABEL, color=MUTED)
    axes.tick_params(length=2.5, width=0.6, color=MUTED, labelcolor=INK, labelsize=LABEL)
    for spine in axes.spines.values():
        spine.set_visible(False)


def label_columns(axes: Axes, labels: list[str], width: float) -> None:
    """Label columns of `width` inches. Long labels are rotated; some are left out if they would overlap."""
    every = max(int(0.14 / width + 0.999), 1)
    longest = max(map(len, labels), default=0) * 0.075 + 0.08
    angle = 0 if longest <= width else 45 if len(labels) <= 30 else 90
    axes.set_xticks(range(0, len(labels), every))
    turned = {} if angle == 0 else {"ha": "right", "va": "center" if angle == 90 else "top", "rotation_mode": "anchor"}
    axes.set_xticklabels(labels[::every], rotation=angle, **turned)  # pyright: ignore[reportArgumentType]


def label_rows(axes: Axes, labels: list[str], height: float) -> None:
    """Label rows `height` inches high, with fewer labels if they would overlap."""
    every = next((n for n in (1, 2, 4, 5, 10) if n * height >= 0.14), 20)
    axes.set_yticks(range(0, len(labels), every))
    axes.set_yticklabels(labels[::every])


def outline(axes: Axes, row: int, column: int) -> None:
    """Draw a frame around a cell."""
    from matplotlib.patches import Rectangle

    for colour, width in (("white", 3.4), ("black", 1.7)):
        box = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=colour, linewidth=width, zorder=5)
        box.set_clip_on(False)
        axes.add_patch(box)


def _as_text(figure: Figure) -> None:
    """Disable math parsing, so that `$` and `\\` are literal, and set fonts that have the glyphs."""
    from matplotlib.text import Text

    for axes in figure.axes:
        _ = axes.get_xticklabels(), axes.get_yticklabels()  # creates them
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # pyright: ignore[reportAttributeAccessIssue]
        text.set_family(fonts())  # pyright: ignore[reportAttributeAccessIssue]


def colour_map(colours: Iterable[str], missing: str) -> Any:
    """Return a matplotlib colormap of evenly spaced colours. `missing`: the colour of cells without a value."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("patchclamp", list(colours)).with_extremes(bad=missing)


# -- plotly


def frame(row: int, column: int, reference: int) -> dict[str, Any]:
    """Return a plotly shape that frames a cell. `reference`: the panel's number, counted from 1."""
    axis = "" if reference == 1 else str(reference)
    return {"type": "rect", "xref": f"x{axis}", "yref": f"y{axis}", "x0": column - 0.5, "x1": column + 0.5,
            "y0": row - 0.5, "y1": row + 0.5, "line": {"color": "black", "width": 2.5}}  # fmt: skip


def titled(picture: Picture) -> Interactive:
    """Return a picture as a plotly figure that includes the title; a page shows the title above the figure instead."""
    figure, lines = picture.figure(), textwrap.wrap(picture.title, 90)
    text = "<br>".join(map(html_text, lines))
    room = 24 * len(lines)
    return figure.update_layout(
        title={"text": text, "x": 0.01, "yref": "container", "y": 1, "yanchor": "top", "pad": {"t": 16}},
        height=figure.layout.height + room, margin_t=figure.layout.margin.t + room,
    )  # fmt: skip


def html_text(text: str) -> str:
    """Return text for a plotly label or tooltip, with markup escaped and line breaks kept."""
    return escape(text, quote=False).replace("\n", "<br>")


def add_cells(figure: Interactive, values: Any, hover: list[list[str]], labels: Sequence[Sequence[str]],
              names: Sequence[str | None], at: dict[str, Any], **how: Any) -> None:  # fmt: skip
    """Add a panel of cells, each with hover text. `labels`: column and row labels; `names`: names of both axes."""
    figure.add_trace(need("plotly.graph_objects").Heatmap(
        z=values, xgap=1, ygap=1, customdata=hover, hovertemplate="%{customdata}<extra></extra>", hoverongaps=False,
        **how,
    ), **at)  # fmt: skip
    for update, texts, name in zip((figure.update_xaxes, figure.update_yaxes), labels, names, strict=True):
        update(tickvals=list(range(len(texts))), ticktext=texts, title_text=name, **at)


def lay_out(figure: Interactive, height: int) -> Interactive:
    """Set the height, colours and font of a plotly figure that has cells."""
    figure.update_layout(height=height, plot_bgcolor=BLANK, margin={"t": 60},
                         font={"family": PAGE_FONT, "color": INK})  # fmt: skip
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(showgrid=False, zeroline=False)
    return figure
