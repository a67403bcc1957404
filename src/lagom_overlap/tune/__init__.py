"""Search by ask and tell: the tuners of the papers, the guard, and the study that runs them."""

from lagom_overlap.tune.base import Problems, Trial, Tuner

__all__ = ["Problems", "Trial", "Tuner"]
