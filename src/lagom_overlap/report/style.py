"""How the figures look: one palette, one layout, labels that cannot be markup.

Figures leave the colours of text, axes and grids to the page, which knows whether it is light, dark or on paper.
The palette is Okabe and Ito's (2008), safe for colour-blind readers, less the black and the yellow that one of the two
backgrounds would swallow and the blue that is kept for what a run arrived at, and three more hues at its end.
"""

import html
from collections.abc import Mapping
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Final

from lagom_overlap.units import MS, US

if TYPE_CHECKING:  # for the annotations: the terminal takes colours from here and must not wait for plotly
    import plotly.graph_objects as go

PALETTE: Final = ("#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#8C6BB1", "#7A5C3E", "#999933")
"""One colour per collective of a group, in order; they repeat after eight."""
NEUTRAL: Final = "#8A919C"
"""Lines and marks that should stay behind; readable on white and on near-black."""
ACCENT: Final = "#0072B2"
"""What the run arrived at: the best so far, tuned; never a collective."""
GOOD: Final = "#009E73"
BAD: Final = "#D55E00"
COMPUTE: Final = ("#66717E", "#7D8894")
"""Computations in a timeline, taking turns so that neighbours stay apart."""
MAKESPAN_SCALE: Final = "Viridis"

_DASHES: Final = ("solid", "dash", "dot", "dashdot")


def colour_of(index: int) -> str:
    """The colour of the `index`-th collective."""
    return PALETTE[index % len(PALETTE)]


def dash_of(index: int) -> str:
    """A line style that changes when the colours repeat."""
    return _DASHES[index // len(PALETTE) % len(_DASHES)]


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on the colour (relative luminance of WCAG 2.1)."""
    channels = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#14171B" if luminance > 0.36 else "#FFFFFF"


def label(text: str, max_length: int = 40) -> str:
    """A text as plotly shows it literally: control characters made visible, shortened, no markup."""
    plain = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    if len(plain) > max_length:
        plain = plain[: max_length - 1] + "…"
    return html.escape(plain, quote=False)


def time_unit(largest_s: float) -> tuple[float, str]:
    """The unit for an axis that reaches `largest_s`: its length in seconds and its name."""
    for unit, name in ((1.0, "s"), (MS, "ms")):
        if largest_s >= unit:
            return unit, name
    return US, "us"


def log_axis(low: float, high: float) -> dict[str, object]:
    """A logarithmic axis from `low` to `high` with the numbers 1, 2, 5 times powers of ten spelled out."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    ticks = [value for power in powers for factor in (1, 2, 5) if low <= (value := factor * 10.0**power) <= high]
    return {
        "type": "log",
        "range": [log10(low), log10(high)],
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }


def lay_out(figure: "go.Figure", height: int, **layout: object) -> "go.Figure":
    """The figure with the common layout and this one's on top.

    All at once: plotly takes three times as long to change one property after the other.
    """
    figure.layout.template = None  # before it is asked for: plotly's own is large
    held = _merged(figure.layout.to_plotly_json(), _COMMON, {"height": height}, layout)
    axes = {name for name in ("xaxis", "yaxis", *held) if name.startswith(("xaxis", "yaxis"))}
    figure.layout = _merged(held, dict.fromkeys(axes, _AXIS))
    return figure.update_layout(template=None)


_COMMON: Final[dict[str, object]] = {
    "margin": {"l": 64, "r": 16, "t": 36, "b": 48},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 12},
    "hovermode": "closest",
    "hoverlabel": {"align": "left"},
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left", "title": {"text": ""}},
    "dragmode": "zoom",
}
_AXIS: Final[dict[str, object]] = {
    "automargin": True,
    "ticks": "outside",
    "ticklen": 4,
    "zeroline": False,
    "showline": True,
    "title": {"standoff": 8},
}


def _merged(*layouts: Mapping[str, object]) -> dict[str, object]:
    """What each says on top of those before it, property by property."""
    result: dict[str, object] = {}
    for layout in layouts:
        for name, value in layout.items():
            old = result.get(name)
            result[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result
