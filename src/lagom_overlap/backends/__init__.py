"""Run an overlap group on a model, a recording or an engine, and report times.

Concrete backends are not imported here: `job.build` resolves their names, so that torch is loaded only when needed.
"""

from lagom_overlap.backends.base import (
    Assignment,
    Backend,
    BackendRequest,
    Failure,
    GroupProblem,
    Measurement,
    Outcome,
    SpaceLimits,
)

__all__ = [
    "Assignment",
    "Backend",
    "BackendRequest",
    "Failure",
    "GroupProblem",
    "Measurement",
    "Outcome",
    "SpaceLimits",
]
