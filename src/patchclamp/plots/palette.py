"""The colours of every picture, in one place so that a picture and a page of one heatmap look alike.

Orange to blue keeps its two sides apart for all common kinds of colour blindness; both ends are equally dark, so the
scale also reads in grey as "how far from the baseline". Source: ColorBrewer, the halves of PuOr and RdBu.
"""

DIVERGING = (
    "#7f3b08", "#b35806", "#e08214", "#fdb863", "#fee0b6", "#f7f7f7",
    "#d1e5f0", "#92c5de", "#4393c3", "#2166ac", "#053061",
)  # fmt: skip

INK, MUTED, RULE, BLANK, FAINT = "#1f2933", "#5f6b7a", "#d5dae1", "#e3e7ec", "#9aa4b1"
PALE = 0.55  # opacity of what is shown paler

# one hue, so that all see its order; it reads in grey too. Source: ColorBrewer, Blues
SEQUENTIAL = (
    "#f7fbff", "#deebf7", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b",
)  # fmt: skip

CLEAN, CORRUPT = "#1b5a9e", "#a04e06"

# lines of a chart, in this order; source: Okabe and Ito 2008, without the yellow, which is too light on white
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", INK)
