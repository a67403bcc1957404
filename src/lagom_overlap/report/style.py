"""How the figures look: one palette, one layout, labels that cannot be markup.

Figures leave the colours of text, axes and grids to the page, which knows whether it is light, dark or on paper.
The palette is Okabe and Ito's (2008), safe for colour-blind readers, less the black and the yellow that one of the two
backgrounds would swallow and the blue that is kept for what a run arrived at, and three more hues at its end.
"""

import html
from collections.abc import Mapping
from math import ceil, floor, log10
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

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


def axis_of(kind: str, row: int) -> str:
    """The layout's name for the "x" or "y" axis of a row, of figures with one column."""
    return f"{kind}axis{'' if row == 1 else row}"


_COMMON: Final = {
    "template": {},  # of its own accord plotly takes colours from its default one
    "margin": {"l": 64, "r": 16, "t": 36, "b": 48},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 12},
    "hovermode": "closest",
    "hoverlabel": {"align": "left"},
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left", "title": {"text": ""}},
    "dragmode": "zoom",
}
_AXIS: Final = {
    "automargin": True, "ticks": "outside", "ticklen": 4, "zeroline": False, "showline": True, "title": {"standoff": 8},
}  # fmt: skip


def bars_height(num_bars: int) -> int:
    """Pixels of a figure of horizontal bars, and of its axis. Chosen by eye."""
    return 34 * num_bars + 90


def lay_out(
    figure: "go.Figure",
    height: int,
    *,
    xaxes: Mapping[str, object] = MappingProxyType({}),
    yaxes: Mapping[str, object] = MappingProxyType({}),
    **layout: object,
) -> "go.Figure":
    """The figure with the common layout and this one's on top; `xaxes` and `yaxes` are what all of its axes have.

    The tables are merged here and handed over once: plotly's own updates look through the whole layout for every key.
    """
    whole: dict[str, Any] = {**figure.layout.to_plotly_json(), "template": None}
    for more in (_COMMON, {"height": height}, layout):
        _merge(whole, more)
    for kind, axes in (("xaxis", xaxes), ("yaxis", yaxes)):
        for name in {kind, *(name for name in whole if name.startswith(kind))}:
            _merge(whole, {name: _AXIS})
            _merge(whole, {name: axes})
    figure.layout = whole
    return figure


def _merge(whole: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Puts the entries of `more` into `whole`, tables into tables."""
    for key, value in more.items():
        if isinstance(value, Mapping):
            whole[key] = dict(whole.get(key) or {})
            _merge(whole[key], value)
        else:
            whole[key] = value
