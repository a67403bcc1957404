"""The report of a plan."""
