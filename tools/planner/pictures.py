"""A picture of how long the steps of layouts take."""

from collections.abc import Mapping

from colossal_vit.drawing import COLORS, NEUTRAL, styled
from matplotlib.figure import Figure

SHARES = {"computing": COLORS[0], "communicating": COLORS[1], "bubble": NEUTRAL}  # a step's time, by what it is for


@styled()
def draw_plan(layouts: Mapping[str, Mapping[str, float]], images: int, title: str) -> Figure:
    """Draw a figure of the step times of layouts as stacked bars from top to bottom, each with its images/s.

    Args:
        layouts: by name: "seconds" of a step, and what shares of it are "computing", "communicating" and "bubble".
        images: of a step.
        title: of the figure.
    """
    figure = Figure(figsize=(9, 3.2))
    axes = figure.subplots()
    names, ends = list(layouts), [0.0] * len(layouts)
    for part, color in SHARES.items():
        seconds = [layout["seconds"] * layout[part] for layout in layouts.values()]
        bars = axes.barh(names, seconds, 0.7, ends, color=color, label=part)
        ends = [end + more for end, more in zip(ends, seconds, strict=True)]
    rates = [f"{images / layout['seconds']:,.0f} images/s" for layout in layouts.values()]
    axes.bar_label(bars, rates, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.grid(axis="y", visible=False)
    axes.set(title=title, xlabel=f"seconds of a step of {images:,} images, predicted")
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper right", ncols=3)
    return figure
