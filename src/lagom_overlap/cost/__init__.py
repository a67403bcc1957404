"""How long things take: kernels under contention, collectives as a function of their knobs."""

from lagom_overlap.cost.communication import CollectiveCost
from lagom_overlap.cost.model import ContentionModel, RunningTimes
from lagom_overlap.cost.profile import Collectives, LinkSource, Profile, load_profile, profile_names

__all__ = [
    "CollectiveCost",
    "Collectives",
    "ContentionModel",
    "LinkSource",
    "Profile",
    "RunningTimes",
    "load_profile",
    "profile_names",
]
