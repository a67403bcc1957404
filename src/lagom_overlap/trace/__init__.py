"""Profiler files to and from timelines."""

from lagom_overlap.trace.chrome import chrome_trace, timelines_from_chrome

__all__ = ["chrome_trace", "timelines_from_chrome"]
