"""The report of a simulated iteration."""
