"""Models by name, as modules without weights, and how they are parallelised for a capture."""
