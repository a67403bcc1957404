"""Worker threads with genuine contention: an instrument, not a product path."""
