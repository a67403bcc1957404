"""The model of the machine: what a collective takes and what it costs the computations, with few constants."""
