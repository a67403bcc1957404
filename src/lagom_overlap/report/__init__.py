"""Show a run to people: HTML, terminal tables.

`html` and `terminal` are imported where they are used: plotly, jinja2 and rich are not free to import.
"""

from lagom_overlap.report.model import CompareRow, TuneReport

__all__ = ["CompareRow", "TuneReport"]
