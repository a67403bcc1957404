"""The one renderer of our HTML pages: a template over the shared base, one file that needs no network.

plotly.js is inlined once where a page has interactive figures; the page's own policy forbids it to load anything. Names
of jobs, operators, files and communicators are data: jinja2 escapes them in the text, `style.label` in the figures, and
the figures' JSON escapes what could end a script.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

if TYPE_CHECKING:  # a page without figures is also drawn by a rank of a job, which must not wait for plotly
    import plotly.graph_objects as go


@dataclass(frozen=True, slots=True)
class EmbeddedFigure:
    """A plotly figure as a page holds it; `caption` is the template's own where it is empty."""

    json: Markup
    height: int
    caption: str = ""


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("lagom_overlap.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _inline(name: str) -> Markup:
    environment = _environment()
    if environment.loader is None:
        raise AssertionError("the environment has a loader")
    source, _, _ = environment.loader.get_source(environment, name)
    return Markup(source)


def render(template: str, *, has_figures: bool, **values: object) -> str:
    """The page; the same values give the same page. `has_figures`: it holds plotly figures, so it carries plotly.js."""
    return (
        _environment()
        .get_template(template)
        .render(
            css=_inline("report.css"),
            js=_inline("report.js") if has_figures else Markup(),
            plotly_js=_plotly_js() if has_figures else Markup(),
            **values,
        )
    )


def _plotly_js() -> Markup:
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 - see the top

    return Markup(get_plotlyjs())


def embedded(figure: "go.Figure", caption: str = "") -> EmbeddedFigure:
    """A figure as a page holds it."""
    text = figure.to_json().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return EmbeddedFigure(Markup(text), int(figure.layout.height), caption)


def embedded_if_any(figure: "go.Figure | None") -> EmbeddedFigure | None:
    """The same for a figure that may be missing."""
    return None if figure is None else embedded(figure)
