"""Time of one pass (forward or backward of a part of the model) on one GPU, by what it is spent on."""

from collections.abc import Callable
from dataclasses import dataclass, field

from lagom_overlap.cost.operators.links import GroupLinks
from lagom_overlap.workload.parallel import CommStep, ComputeStep, GroupKind, Pass


@dataclass(frozen=True, slots=True)
class CommTimes:
    """Seconds of a communicator: running, running while nothing computed, and what it stretched computation by."""

    total_s: float = 0.0
    exposed_s: float = 0.0
    stretched_s: float = 0.0

    def __add__(self, other: "CommTimes") -> "CommTimes":
        return CommTimes(
            self.total_s + other.total_s, self.exposed_s + other.exposed_s, self.stretched_s + other.stretched_s
        )

    def __mul__(self, factor: float) -> "CommTimes":
        return CommTimes(self.total_s * factor, self.exposed_s * factor, self.stretched_s * factor)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of a pass: kernels alone, what launching adds, and every communicator's part."""

    compute_s: float = 0.0
    host_s: float = 0.0
    comms: dict[GroupKind, CommTimes] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The whole pass."""
        return self.compute_s + self.host_s + sum(c.exposed_s + c.stretched_s for c in self.comms.values())

    def __add__(self, other: "PassTimes") -> "PassTimes":
        comms = dict(self.comms)
        for group, times in other.comms.items():
            comms[group] = comms.get(group, CommTimes()) + times
        return PassTimes(self.compute_s + other.compute_s, self.host_s + other.host_s, comms)

    def __mul__(self, factor: float) -> "PassTimes":
        comms = {group: times * factor for group, times in self.comms.items()}
        return PassTimes(self.compute_s * factor, self.host_s * factor, comms)


Beside = Callable[[CommStep, tuple[ComputeStep, ...]], CommTimes]
"""What a collective costs with kernels beside it: its time, what is left exposed, what it stretches."""


def pass_times(
    one: Pass,
    step_seconds: Callable[[ComputeStep], float],
    links: GroupLinks,
    beside: Beside,
    *,
    launch_s: float,
    launch_norm: float,
) -> PassTimes:
    """The parts of a pass; `step_seconds` is the GPU's time for a step alone, `launch_s` the host's per kernel.

    The host's time for all launches and the GPU's for all kernels blend by a p-norm: a short pass is as long as its
    launches. A collective that the stream waits for adds its own time: behind it the launch queue has run empty.
    """
    compute_s = sum(step_seconds(step) for step in one.kernels)
    host_s = launch_s * sum(step.num_launches for step in one.kernels)
    longer, shorter = max(compute_s, host_s), min(compute_s, host_s)
    blended_s = longer * (1.0 + (shorter / longer) ** launch_norm) ** (1.0 / launch_norm) if longer else 0.0
    comms: dict[GroupKind, CommTimes] = {}
    for step in one.comms:
        if step.hidden_by:
            cost = beside(step, step.hidden_by)
        else:
            seconds = links.seconds(step.kind, step.num_bytes, step.group)
            cost = CommTimes(seconds, seconds)
        comms[step.group] = comms.get(step.group, CommTimes()) + cost
    return PassTimes(compute_s, blended_s - compute_s, comms)
