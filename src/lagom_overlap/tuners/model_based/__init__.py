"""Just enough: a model of the contention, fitted as it goes, says how little communication needs to stay hidden."""

from lagom_overlap.tuners.model_based.tuner import ModelBased

__all__ = ["ModelBased"]
