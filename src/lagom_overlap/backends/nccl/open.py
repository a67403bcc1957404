"""Opening the nccl backend: on rank 0 the backend, on every other rank a life as its follower. Needs no torch."""

import importlib.util
from typing import Final

from lagom_overlap.backends.base import Backend, BackendRequest
from lagom_overlap.backends.nccl.launched import RankPlace, read_launched
from lagom_overlap.errors import BackendError, MissingDependencyError

HOW_TO_START: Final = (
    "start one rank per GPU: torchrun --nproc-per-node 8 -m lagom_overlap tune JOB.toml --backend nccl "
    "(or srun with MASTER_ADDR and MASTER_PORT set)"
)


def open_backend(request: BackendRequest) -> Backend:
    """The backend of a job with `backend = "nccl"`, on rank 0 of the launched ranks.

    Raises:
        MissingDependencyError: if torch is not installed, or this installation lacks the plug-in.
        BackendError: if there is no GPU or no launcher.
    """
    launched = _checked(read_launched())
    # Not at the top: torch is loaded only where the backend is opened.
    from lagom_overlap.backends.nccl.backend import lead  # noqa: PLC0415

    return lead(launched, request)


def join_if_launched() -> int | None:
    """The exit code of this process if it is a launched rank other than 0, which it lives through here; else None.

    Raises:
        BackendError: if there is no GPU, or the launcher's variables are wrong.
        MissingDependencyError: if torch is not installed, or this installation lacks the plug-in.
    """
    launched = read_launched()
    if launched is None or launched.rank == 0:
        return None
    _checked(launched)
    # Not at the top: torch is loaded only where the process becomes a rank.
    from lagom_overlap.backends.nccl.backend import follow_rank_0  # noqa: PLC0415

    follow_rank_0(launched)
    return 0


def _checked(launched: RankPlace | None) -> RankPlace:
    """Refuses what cannot work, cheapest first."""
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("the nccl backend needs torch: pip install torch")
    import torch  # noqa: PLC0415  torch is an extra

    if not torch.cuda.is_available():
        raise BackendError(
            f"the nccl backend needs CUDA, which torch {torch.__version__} does not find on this machine"
        )
    if launched is None:
        raise BackendError(f"the nccl backend runs under a launcher; {HOW_TO_START}")
    return launched
