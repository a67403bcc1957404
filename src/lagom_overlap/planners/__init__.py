"""Planning: an iteration becomes one that computes the same and overlaps more."""
