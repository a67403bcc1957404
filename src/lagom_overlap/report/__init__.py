"""Show a run to people: HTML, terminal tables."""
