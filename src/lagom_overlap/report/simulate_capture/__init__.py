"""The report of a simulated capture."""
