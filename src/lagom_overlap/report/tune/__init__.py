"""The report of a tuning run."""
