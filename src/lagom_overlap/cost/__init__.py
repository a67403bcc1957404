"""How long things take: kernels under contention, collectives as a function of their knobs."""
