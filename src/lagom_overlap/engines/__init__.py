"""Apply a configuration to real collectives."""
