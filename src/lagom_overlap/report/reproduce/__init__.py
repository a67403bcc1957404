"""The report of a reproduction of the papers' figures."""
