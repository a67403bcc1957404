"""The one renderer of our HTML pages: a template over the shared base, one file that needs no network.

Figures are plotly's own descriptions (traces and layout), the same objects that `figure()` returns in a notebook;
`report.js` draws them as SVG, because plotly.js alone is 4.9 MB. The page's policy forbids it to load anything. Names
of jobs, operators, files and communicators are data: jinja2 escapes them in the text, `style.label` in the figures, and
the figures' JSON escapes what could end a script.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:  # a page without figures is also drawn by a rank of a job, which must not wait for plotly
    import jinja2
    import plotly.graph_objects as go


@dataclass(frozen=True, slots=True)
class EmbeddedFigure:
    """A plotly figure as a page holds it; `caption` is the template's own where it is empty."""

    json: Markup
    height: int
    caption: str = ""


@cache
def _environment() -> "jinja2.Environment":
    import jinja2  # noqa: PLC0415 - words and terminals stand in one module with their page, and do without it

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


def render(template: str, **values: object) -> str:
    """The page; the same values give the same page."""
    return (
        _environment()
        .get_template(template)
        .render(
            css=_inline("report.css"),
            js=_inline("report.js"),
            **values,
        )
    )


def embedded(figure: "go.Figure", caption: str = "") -> EmbeddedFigure:
    """A figure as a page holds it."""
    text = figure.to_json().replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return EmbeddedFigure(Markup(text), int(figure.layout.height), caption)


def embedded_if_any(figure: "go.Figure | None") -> EmbeddedFigure | None:
    """The same for a figure that may be missing."""
    return None if figure is None else embedded(figure)
