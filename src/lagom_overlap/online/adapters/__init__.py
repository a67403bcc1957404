"""How a framework's collectives come to a route: one module per framework."""
