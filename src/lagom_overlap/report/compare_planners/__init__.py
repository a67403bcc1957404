"""The report of a comparison of planners."""
