"""Measure overlap groups on real NCCL: ranks started by torchrun or srun, one GPU each, set by the tuner plug-in.

Importing this package needs no torch; opening the backend does. Tested over gloo with the plug-in under a fake NCCL;
run on one H100 that two ranks shared.
"""

from lagom_overlap.backends.nccl.launched import RankPlace, read_launched
from lagom_overlap.backends.nccl.open import join_if_launched, open_backend

__all__ = ["RankPlace", "join_if_launched", "open_backend", "read_launched"]
