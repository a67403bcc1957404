"""FSDP2's hooks around the modules of a step, whoever issues its operators: a built step's or a captured one's.

PyTorch 2.13, `_fsdp_param_group.py`, `_fsdp_state.py`:

- `pre_forward`, `pre_backward`: what is sharded is unsharded (copies into the gather's buffer, then the gather, each on
  a stream of its own), computations wait for it and copy it out (`wait_for_unshard`), then the modules that this one
  names are unsharded: unless it is told, none in forward, and in backward the one before it in forward's order.
- The gather streams wait in forward for the copy-out of the module before, in backward for the module's own.
- The root's pre-forward: they wait for all that was computed; its post-forward: for forward's last copy-out.
- `post_backward`: computations wait for an earlier reduction before they copy gradients into its buffer: for the one
  before (2.13), or further back where there are more buffers (`set_reduce_scatter_max_input_buffers`).
"""

from collections.abc import Sequence
from typing import Final, Generic, Protocol, TypeVar

from lagom_overlap.workload.streams import ALL_GATHER, ALL_GATHER_COPY_IN

GATHER_STREAMS: Final = (ALL_GATHER_COPY_IN, ALL_GATHER)
FORWARD_PREFETCH: Final = 0
"""Modules that FSDP2 unshards ahead in the forward, where it is told nothing."""
BACKWARD_PREFETCH: Final = 1
"""In the backward: one, behind the copy-out of its own."""


class Gathering(Protocol):
    """One gathering of a module's parameters."""

    @property
    def parameters(self) -> str:
        """What is gathered; while it is unsharded it is not gathered again."""

    @property
    def is_forward(self) -> bool:
        """Whether it is forward's, or else backward's."""


Unit = TypeVar("Unit")
AnyGathering = TypeVar("AnyGathering", bound=Gathering)
Gathering_contra = TypeVar("Gathering_contra", bound=Gathering, contravariant=True)


class Issuing(Protocol[Gathering_contra]):
    """What issues a step's operators at the hooks' word."""

    def gather(self, gathering: Gathering_contra) -> None:
        """Issues the copies into a gather's buffer and the gather."""

    def wait_for_computations(self, batch: int) -> None:
        """What the gather streams are told next waits for all that was computed before this micro-batch."""

    def hold_back(self, name: str) -> None:
        """What the gather streams are told next waits for this operator."""


class GatherHooks(Generic[AnyGathering]):
    """When parameters are gathered, and what the gather streams wait for.

    Whoever issues the step calls `begin_forward` before each micro-batch, `unshard` and `before_copy_out` before
    computations copy parameters out of their buffer, and `after_copy_out` behind that.
    """

    def __init__(self, issuing: Issuing[AnyGathering]) -> None:
        self._issuing = issuing
        self._unsharded: set[str] = set()
        self._last_copy_out: str | None = None

    def begin_forward(self, batch: int) -> None:
        """The root's pre-forward: what is gathered next waits for all that was computed so far."""
        self._issuing.wait_for_computations(batch)

    def unshard(self, gathering: AnyGathering) -> None:
        """Gathers what is sharded."""
        if gathering.parameters in self._unsharded:
            return
        self._unsharded.add(gathering.parameters)
        if not gathering.is_forward:
            self.end_forward()
        self._issuing.gather(gathering)

    def before_copy_out(self, gathering: AnyGathering) -> None:
        """In forward what is gathered next waits for the copy-out of the module before."""
        if gathering.is_forward and self._last_copy_out is not None:
            self._issuing.hold_back(self._last_copy_out)

    def after_copy_out(self, gathering: AnyGathering, copied: str) -> None:
        """In backward what is gathered next waits for this copy-out."""
        if gathering.is_forward:
            self._last_copy_out = copied
        else:
            self._issuing.hold_back(copied)

    def end_forward(self) -> None:
        """The root's post-forward: what is gathered next waits for forward's last copy-out."""
        if self._last_copy_out is not None:
            self._issuing.hold_back(self._last_copy_out)
            self._last_copy_out = None

    def reshard(self, parameters: str) -> None:
        """The parameters are freed: who needs them gathers them again."""
        self._unsharded.discard(parameters)


def prefetched(units: Sequence[Unit], place: int, count: int, *, is_forward: bool) -> Sequence[Unit]:
    """The `count` units that the one at `place` prefetches, first needed first; `units` are in forward's order."""
    if is_forward:
        return units[place + 1 : place + 1 + count]
    return units[max(0, place - count) : place][::-1]


def reduce_communicator(communicator: str) -> str:
    """The communicator of reductions where they have one of their own (`set_separate_reduce_scatter_group`)."""
    return f"{communicator}/reduce"


def awaited_reduction(reductions: Sequence[str], number: int, num_buffers: int) -> str | None:
    """The reduction whose buffer reduction `number` takes: computations wait for it before they copy into that."""
    return reductions[number - num_buffers] if number >= num_buffers else None
