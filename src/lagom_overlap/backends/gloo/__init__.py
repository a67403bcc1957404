"""Measure overlap groups on real collectives: rank processes, torch's gloo, CPU cores.

Importing this package needs no torch; opening a backend does.
"""

from lagom_overlap.backends.gloo.backend import RankBackend, open_backend
from lagom_overlap.backends.gloo.launched import join_if_launched_by_torchrun
from lagom_overlap.backends.gloo.link import probe_link_emulation
from lagom_overlap.backends.gloo.terms import GLOO, EngineLimits
from lagom_overlap.backends.gloo.torch_extra import require_torch

__all__ = [
    "GLOO",
    "EngineLimits",
    "RankBackend",
    "join_if_launched_by_torchrun",
    "open_backend",
    "probe_link_emulation",
    "require_torch",
]
