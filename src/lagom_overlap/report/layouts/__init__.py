"""The report of ranked layouts."""
