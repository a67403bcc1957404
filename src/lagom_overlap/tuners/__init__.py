"""Search by ask and tell: the tuners of the papers, the guard, and the study that runs them."""
