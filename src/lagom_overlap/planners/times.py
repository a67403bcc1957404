"""How long operators take alone: from the cost model, measured per shape, or measured per operator of one step."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from lagom_overlap.collective import Collective, CommConfig
from lagom_overlap.collective.config import UNTOUCHED
from lagom_overlap.cost import ContentionModel
from lagom_overlap.cost.operators import FrameworkConstants
from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import OpTimes
from lagom_overlap.sim.framework import BARE, FrameworkModel
from lagom_overlap.workload import CommOp, Iteration, Op, Work


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """Times of the contention model with nothing else running; `configs` names collectives that are configured.

    A piece of a collective (`c#0`, `c/g1`, `c.rs`) has the configuration of the whole. `framework` adds to a simulated
    step, not to an operator alone.
    """

    model: ContentionModel
    configs: Mapping[str, CommConfig] = field(default_factory=lambda: MappingProxyType({}))
    framework: FrameworkConstants = BARE
    _known: dict[object, float] = field(default_factory=dict, compare=False, repr=False)

    @property
    def price(self) -> FrameworkModel:
        """What simulates a whole step."""
        return FrameworkModel(self.model, self.framework)

    def seconds(self, op: Op) -> float:
        """Seconds of one operator alone."""
        config = self.configs.get(origin_name(op.name, self.configs), UNTOUCHED)
        key = (op.collective, config) if isinstance(op, CommOp) else op.work
        if key not in self._known:
            self._known[key] = (
                self.model.collective(op.collective, config).seconds()
                if isinstance(op, CommOp)
                else self.model.kernel_seconds(self.model.kernel(op.work))
            )
        return self._known[key]


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """Times measured per shape: Concerto's profile, cached by what is computed or moved.

    Whole operators and their pieces are both looked up; what was not measured comes from `otherwise`.
    """

    table: Mapping[Work | Collective, float]
    otherwise: OpTimes | None = None

    def seconds(self, op: Op) -> float:
        """Seconds of one operator alone.

        Raises:
            JobError: if its shape was not measured and nothing else knows it.
        """
        shape = op.collective if isinstance(op, CommOp) else op.work
        known = self.table.get(shape)
        if known is not None:
            return known
        if self.otherwise is None:
            raise JobError(f"{op.name}: no time was measured for {shape}, and no cost model is given")
        return self.otherwise.seconds(op)


@dataclass(frozen=True, slots=True)
class NamedTimes:
    """Times measured per operator of one step, by name.

    What a rewrite made of an operator takes `model`'s time times the factor by which the whole operator differs from
    `model`; operators that were not measured take `model`'s time.
    """

    measured_s: Mapping[str, float]
    iteration: Iteration
    model: OpTimes
    _factors: dict[str, float] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        ops = {op.name: op for op in self.iteration.ops}
        for name, seconds in self.measured_s.items():
            if name not in ops:
                raise JobError(f"a time was measured for {name!r}, no operator of iteration {self.iteration.name!r}")
            if not 0 < seconds < float("inf"):
                raise JobError(f"{name}: measured time is {seconds} s, must be positive and finite")
            self._factors[name] = seconds / self.model.seconds(ops[name])

    def seconds(self, op: Op) -> float:
        """Seconds of one operator alone."""
        return self.model.seconds(op) * self._factors.get(origin_name(op.name, self._factors), 1.0)


def origin_name(name: str, known: Mapping[str, object]) -> str:
    """The longest beginning of `name`, cut where `workload.rewrite` appends (`# / . +`), that is known; or `name`."""
    for end in range(len(name), 0, -1):
        if (end == len(name) or name[end] in "#/.+") and name[:end] in known:
            return name[:end]
    return name
