"""Execute a plan: its rewrites applied to an FX graph with functional collectives, two streams, ranks that agree."""
