"""The report of a comparison of tuners."""
