"""The computation's side of an overlap: how the kernels that overlap the collectives are launched.

Three knobs, for a whole overlap group at a time:

    sm_carveout   SMs that a persistent kernel leaves free: it launches one block per SM on the others
                  (`torch._C._set_sm_carveout_experimental`, cuBLAS's SM_COUNT_TARGET)
    order         who is enqueued first where a collective and a computation become ready at the same moment
    priority      of the collectives' stream: whether a freed SM goes to a waiting collective or to the older kernel

They are no knobs of a collective: torch's carve-out is one flag of the process, read when a kernel is launched. So they
stand next to a group's `CommConfig`s (`LaunchedAssignment`), not inside them, and a search that does not support them
leaves the computation untouched.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise, product

from lagom_overlap.collective.config import CommConfig
from lagom_overlap.errors import SpaceError


class LaunchOrder(StrEnum):
    """Who is enqueued first where both could be."""

    COLLECTIVE_FIRST = "collective_first"
    COMPUTATION_FIRST = "computation_first"


class StreamPriority(StrEnum):
    """The priority of the collectives' stream; computation has the normal one."""

    HIGH = "high"
    NORMAL = "normal"


class LaunchScope(StrEnum):
    """Whether a setting of the computation's side holds for one group or for the whole step."""

    GROUP = "group"
    STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchConfig:
    """How a group's computation is launched during its collectives; every None means: as the job does untouched."""

    sm_carveout: int | None = None
    order: LaunchOrder | None = None
    priority: StreamPriority | None = None

    def __post_init__(self) -> None:
        if self.sm_carveout is not None and self.sm_carveout < 0:
            raise SpaceError(f"sm_carveout is {self.sm_carveout}, must be at least 0 (or absent)")

    @property
    def is_untouched(self) -> bool:
        """Whether no knob is set."""
        return self == UNTOUCHED_LAUNCH

    def __str__(self) -> str:
        words = [] if self.sm_carveout is None else [f"{self.sm_carveout} SMs carved out"]
        words += [] if self.order is None else [self.order.replace("_", " ")]
        words += [] if self.priority is None else [f"{self.priority} stream priority"]
        return ", ".join(words) or "untouched"


UNTOUCHED_LAUNCH = LaunchConfig()
"""No knob set: kernels are launched as they would be without us."""


def one_launch(launches: Iterable[LaunchConfig]) -> LaunchConfig:
    """Several launches as one: the largest carve-out, and an order or priority only if all share it.

    Deterministic: the same launches give the same result on every rank.
    """
    several = list(launches)
    orders, priorities = {launch.order for launch in several}, {launch.priority for launch in several}
    return LaunchConfig(
        sm_carveout=max((launch.sm_carveout for launch in several if launch.sm_carveout is not None), default=None),
        order=orders.pop() if len(orders) == 1 else None,
        priority=priorities.pop() if len(priorities) == 1 else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpace:
    """What may be tried on the computation's side; an empty axis is left alone, None is always among the values.

    `sm_carveouts` are increasing. `scope` says whether each group has a setting of its own, or all groups of a step
    share one.
    """

    sm_carveouts: tuple[int, ...] = ()
    orders: tuple[LaunchOrder, ...] = ()
    priorities: tuple[StreamPriority, ...] = ()
    scope: LaunchScope = LaunchScope.GROUP

    def __post_init__(self) -> None:
        carved = self.sm_carveouts
        if any(a >= b for a, b in pairwise(carved)) or (carved and carved[0] < 0):
            raise SpaceError(f"sm_carveout is {list(carved)}, must be increasing whole numbers of at least 0")
        for name, values in (("launch_order", self.orders), ("stream_priority", self.priorities)):
            if len(set(values)) != len(values):
                raise SpaceError(f"{name} is {[str(value) for value in values]}, must not repeat a value")

    def __len__(self) -> int:
        return (1 + len(self.sm_carveouts)) * (1 + len(self.orders)) * (1 + len(self.priorities))

    def __iter__(self) -> Iterator[LaunchConfig]:
        for carved, order, priority in product(
            (None, *self.sm_carveouts), (None, *self.orders), (None, *self.priorities)
        ):
            yield LaunchConfig(sm_carveout=carved, order=order, priority=priority)

    def __contains__(self, launch: object) -> bool:
        return isinstance(launch, LaunchConfig) and any(launch == other for other in self)

    @property
    def is_untouched(self) -> bool:
        """Whether there is nothing to try."""
        return len(self) == 1

    def carveout_for(self, num_channels: int) -> int | None:
        """The smallest carve-out that holds that many channels; None where none does."""
        return next((carved for carved in self.sm_carveouts if carved >= num_channels), None)


NO_LAUNCHES = LaunchSpace()
"""Nothing to try: the computation is left alone."""


class LaunchedAssignment(tuple[CommConfig, ...]):
    """An assignment (a tuple of `CommConfig`, one per collective) that also sets the computation's side.

    A plain tuple leaves the computation untouched; the published tuners return those. Code that deals with collectives
    only reads either alike; code that runs a group asks `launch_of`. Two are equal only if both sides are, so that
    measurements under different launches are never mixed up.

    A tuple derived from it (a slice, `(*head, config)`) loses the launch: `launched(derived, launch_of(assignment))`
    keeps it. Only `launched` makes these.
    """

    _launch: LaunchConfig

    def __new__(cls, configs: Iterable[CommConfig], launch: LaunchConfig) -> "LaunchedAssignment":
        """Both sides.

        Raises:
            ValueError: if the launch is untouched: that is a plain tuple, or equal values would differ.
        """
        if launch.is_untouched:
            raise ValueError("an untouched launch is a plain tuple of configurations")
        assignment = super().__new__(cls, configs)
        assignment._launch = launch
        return assignment

    @property
    def launch(self) -> LaunchConfig:
        """The computation's side."""
        return self._launch

    def __getnewargs__(self) -> tuple[tuple[CommConfig, ...], LaunchConfig]:
        return tuple(self), self._launch

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LaunchedAssignment):
            return False if isinstance(other, tuple) else NotImplemented
        return self._launch == other._launch and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple.__hash__(self), self._launch))

    def __repr__(self) -> str:
        return f"LaunchedAssignment({tuple(self)!r}, {self._launch!r})"


def launched(configs: Iterable[CommConfig], launch: LaunchConfig) -> tuple[CommConfig, ...]:
    """The configurations with that launch in place of any they had; a plain tuple where it is untouched."""
    return tuple(configs) if launch.is_untouched else LaunchedAssignment(configs, launch)


def launch_of(assignment: tuple[CommConfig, ...]) -> LaunchConfig:
    """How an assignment launches the computation."""
    return assignment.launch if isinstance(assignment, LaunchedAssignment) else UNTOUCHED_LAUNCH
