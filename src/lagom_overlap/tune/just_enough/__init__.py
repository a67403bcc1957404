"""Just enough: a model of the contention, fitted as it goes, says how little communication needs to stay hidden."""

from lagom_overlap.tune.just_enough.tuner import JustEnough

__all__ = ["JustEnough"]
