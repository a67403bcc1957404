"""Show a run to people: HTML, terminal tables.

`html` and `terminal` are imported where they are used: plotly, jinja2 and rich are not free to import.
"""

from importlib import import_module

__all__ = ["CompareRow", "TuneReport"]


def __getattr__(name: str) -> object:
    """The tuning report's values, imported when first asked for: they stand on half of the package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lagom_overlap.report.model"), name)
