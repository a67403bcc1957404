"""The seam between a configuration and a real collective; shared by the measuring backends and by training jobs.

A step is: `apply` a table on every rank, then `execute` each call of the step. Engines speak in call sites
(`ConfigKey`), the names that a saved configuration carries into the next run.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from lagom_overlap.collective import Collective, ConfigKey, ConfigSpace, ConfigTable


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """What one collective reads and writes on this rank: flat, contiguous tensors; one and the same for an all-reduce.

    With n ranks and S elements in the whole tensor: an all-gather reads S/n and writes S, a reduce-scatter reads S and
    writes S/n, an all-to-all reads S and writes S.
    """

    source: torch.Tensor
    target: torch.Tensor

    def __post_init__(self) -> None:
        for tensor in (self.source, self.target):
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(f"buffers must be flat and contiguous, got a tensor of shape {tuple(tensor.shape)}")


class Handle(Protocol):
    """A collective in flight; a `torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Returns when this rank's target is complete (on a device: when its stream is ordered behind it)."""


class Engine(Protocol):
    """One rank's access to collectives whose knobs can be set."""

    def space(self, collective: Collective) -> ConfigSpace:
        """What the engine offers to a search for this collective.

        Raises:
            BackendError: if the engine cannot run this collective at all.
        """

    def apply(self, table: ConfigTable, epoch: int) -> None:
        """Makes the table the one in force; a call site without a row is left untouched.

        Collective: every rank calls it with the same table and the same, ever larger, epoch between two steps, so
        that all ranks switch at the same call.

        Raises:
            SpaceError: if a row cannot be set; the former table stays in force.
            ValueError: if the epoch is not larger than the one in force.
        """

    def execute(self, key: ConfigKey, buffers: Buffers) -> Handle:
        """Starts the call under the configuration in force and returns at once.

        Collective: every rank makes the same calls in the same order.
        """
