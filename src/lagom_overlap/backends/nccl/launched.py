"""Which rank this process is: by torchrun's variables, or srun's."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lagom_overlap.errors import BackendError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A process's place in the job; `local_rank` is its GPU."""

    rank: int
    num_ranks: int
    local_rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise BackendError(f"the launcher says rank {self.rank} of {self.num_ranks} ranks")


def read_launched(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """The place of this process; None if no launcher started it.

    torchrun: RANK, WORLD_SIZE, LOCAL_RANK. srun: SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, inside a step of
    several tasks (SLURM_NTASKS is set in a batch script, too, which is one process); MASTER_ADDR and MASTER_PORT must
    then be set, as for any PyTorch job under srun.

    Raises:
        BackendError: if a variable is no whole number, or the address of rank 0 is not set.
    """
    for rank, size, local in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ):
        if rank in environment and size in environment:
            place = RankPlace(
                rank=_number(environment, rank),
                num_ranks=_number(environment, size),
                local_rank=_number(environment, local) if local in environment else 0,
            )
            if place.num_ranks < 2:
                continue
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
            if missing:
                raise BackendError(
                    f"{size} says {place.num_ranks} ranks, but {' and '.join(missing)} is not set: export the address "
                    "and a free port of rank 0's node"
                )
            return place
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise BackendError(f"environment variable {name} is {text!r}, must be a whole number")
    return int(text)
