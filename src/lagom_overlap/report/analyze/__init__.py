"""The report of an analysis."""
