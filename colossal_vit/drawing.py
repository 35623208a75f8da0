"""The one style of all pictures. Import it where something is drawn: matplotlib takes a second."""

import functools

from cycler import cycler
from matplotlib import rc_context

# Okabe and Ito's palette, which colour-blind people can tell apart; those that are pale on white come last.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#F0E442", "#000000")
DARK = (COLORS[0], COLORS[7])  # fills on which text is white
TEXT, NEUTRAL, GRID = "#24292f", "#c8ccd1", "#e4e6e9"
STYLE = {
    "figure.facecolor": "white",  # opaque: the same picture for light and dark pages
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.titlesize": "medium",
    "savefig.dpi": 200,
    "font.size": 9,
    "text.color": TEXT,
    "axes.axisbelow": True,
    "axes.edgecolor": TEXT,
    "axes.grid": True,
    "axes.labelcolor": TEXT,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "grid.color": GRID,
    "legend.frameon": False,
    "lines.markersize": 3.5,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}
styled = functools.partial(rc_context, STYLE)  # `with styled():` around all that makes, fills and saves a figure


def as_text(name: str) -> str:
    """Return a name of a file or a class for a picture: `$` is no formula, and bytes that are no UTF-8 become `?`."""
    return name.encode(errors="replace").decode().replace("$", r"\$")
