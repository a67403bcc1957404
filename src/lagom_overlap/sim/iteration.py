"""A whole iteration: any number of streams, waits between them; a view on the event simulation (`core.py`).

Every stream runs its operators in issue order; an operator starts when its stream is free and what it waits for has
ended.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.collective import Collective, CommConfig
from lagom_overlap.collective.config import UNTOUCHED
from lagom_overlap.cost import CollectiveCost, ContentionModel
from lagom_overlap.cost.model import RunningTimes
from lagom_overlap.errors import SpaceError
from lagom_overlap.sim.columns import Columns
from lagom_overlap.sim.core import EventGraph
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.workload import CommOp, Iteration, Kernel
from lagom_overlap.workload.step.rolled import RolledStep

Limit = Callable[[CommOp, CollectiveCost], CollectiveCost]
"""What a framework makes of a collective's cost."""


class IterationSimulator:
    """Simulates one iteration under any number of configurations; prices, rates and waits are computed once.

    `waits` are the framework's waits beyond the operators' `deps` (`IssuedStep.waits`); a rolled step has its own.
    `host_s` are seconds that each operator's stream waits for the host in it: nothing stretches them. `limit` is what
    the framework makes of the cost of its collectives, `columns` are the operators', if at hand.
    """

    def __init__(
        self,
        iteration: Iteration | RolledStep,
        model: ContentionModel,
        *,
        waits: Mapping[str, Sequence[str]] = MappingProxyType({}),
        host_s: NDArray[np.float64] | None = None,
        limit: Limit | None = None,
        columns: Columns | None = None,
    ) -> None:
        self._iteration = iteration
        self._columns = Columns(iteration) if columns is None else columns
        self._prices = _Prices(model, limit)
        earlier = iteration.earlier() if isinstance(iteration, RolledStep) else _waits(iteration, waits)
        self._graph = EventGraph(earlier, self._prices.set_times)
        self._kinds = self._prices.kernel_kinds(self._columns, host_s)
        self._comms = [(number, op) for number, op in enumerate(self._columns.distinct) if isinstance(op, CommOp)]
        self._comm_names = {op.name for _, op in self._comms}

    def makespan_s(self, configs: Mapping[str, CommConfig]) -> float:
        """Seconds of the iteration; a collective that `configs` does not name runs untouched.

        Raises:
            SpaceError: if a configuration cannot run.
            ValueError: if `configs` names what is no collective of the iteration.
        """
        return max(self.run(configs)[1], default=0.0)

    def timeline(self, configs: Mapping[str, CommConfig]) -> Timeline:
        """Who runs when; raises what `makespan_s` does."""
        return timeline_of(self._iteration, *self.run(configs))

    def run(self, configs: Mapping[str, CommConfig]) -> tuple["array[float]", "array[float]"]:
        """Start and end (s) of every operator in issue order; raises what `makespan_s` does."""
        unknown = sorted(configs.keys() - self._comm_names)
        if unknown:
            raise ValueError(f"configs name {unknown[0]!r}, no collective of iteration {self._iteration.name!r}")
        return self.run_as(lambda op: configs.get(op.name))

    def run_as(self, config_of: Callable[[CommOp], CommConfig | None]) -> tuple["array[float]", "array[float]"]:
        """The same with collectives as a function says, None for untouched.

        Raises:
            SpaceError: if a configuration cannot run.
        """
        kinds = np.zeros(len(self._columns.distinct), np.int32)
        for number, op in self._comms:
            try:
                kinds[number] = self._prices.comm_kind(op, config_of(op) or UNTOUCHED)
            except SpaceError as error:
                raise SpaceError(f"{op.name}: {error}") from error
        return self._graph.run(array("i", np.where(self._kinds < 0, self._kinds, kinds[self._columns.of]).tobytes()))


def timeline_of(iteration: Iteration | RolledStep, starts_s: Sequence[float], ends_s: Sequence[float]) -> Timeline:
    """The operators as spans from `starts_s` to `ends_s`, in the order of the iteration."""
    return Timeline(
        tuple(
            [
                Span(
                    name=op.name,
                    kind=SpanKind.COMM if isinstance(op, CommOp) else SpanKind.COMP,
                    stream=op.stream,
                    start_s=start_s,
                    end_s=end_s,
                )
                for op, start_s, end_s in zip(iteration.ops, starts_s, ends_s, strict=True)
            ]
        )
    )


class _Prices:
    """Distinct collective costs (kinds from 0 up) and kernels (kinds from -1 down), and their times together."""

    def __init__(self, model: ContentionModel, limit: Limit | None) -> None:
        self._model, self._limit = model, limit
        self._costs: list[CollectiveCost] = []
        self._kernels: list[Kernel] = []
        self._host_s: list[float] = []
        self._times: dict[tuple[int, ...], RunningTimes] = {}
        self._comm_kinds: dict[tuple[Collective, str, CommConfig], int] = {}

    def comm_kind(self, op: CommOp, config: CommConfig) -> int:
        """The kind of a collective under a configuration.

        Raises:
            SpaceError: if it cannot run.
        """
        key = (op.collective, op.communicator if self._limit else "", config)
        kind = self._comm_kinds.get(key)
        if kind is None:
            cost = self._model.collective(op.collective, config)
            self._costs.append(cost if self._limit is None else self._limit(op, cost))
            kind = self._comm_kinds[key] = len(self._costs) - 1
        return kind

    def kernel_kinds(self, columns: Columns, host_s: NDArray[np.float64] | None) -> NDArray[np.int32]:
        """The kind of every computation by its work and its wait for the host; 0 for collectives."""
        waits_s, waited = np.unique(np.zeros(1) if host_s is None else host_s, return_inverse=True)
        pairs, kinds = np.unique(columns.works * len(waits_s) + waited, return_inverse=True)
        num_comms = int(np.searchsorted(pairs, 0))  # kinds of collectives, below those of computations
        kernels = [self._model.kernel(work) for work in columns.distinct_works]
        for pair in pairs[num_comms:].tolist():
            self._kernels.append(kernels[pair // len(waits_s)])
            self._host_s.append(float(waits_s[pair % len(waits_s)]))
        return np.array(np.minimum(0, num_comms - 1 - kinds), np.int32)

    def set_times(self, kinds: tuple[int, ...]) -> tuple[float, ...]:
        """One time (s) per running operator by its kind, the collectives first."""
        computing = [-1 - kind for kind in kinds if kind < 0]
        kernels, comms = [self._kernels[place] for place in computing], [kind for kind in kinds if kind >= 0]
        key = *map(id, kernels), *comms  # of works that wait for the host for other times, the same
        times = self._times.get(key)
        if times is None:
            times = self._times[key] = self._model.running_times(kernels, [self._costs[kind] for kind in comms])
        waited = (seconds + self._host_s[place] for seconds, place in zip(times.kernel_s, computing, strict=True))
        return *times.comm_s, *waited


def _waits(iteration: Iteration, beyond: Mapping[str, Sequence[str]]) -> list[list[int]]:
    """Whom each operator waits for: its stream's last, its `deps`, and what `beyond` them it waits for."""
    place: dict[str, int] = {}
    waits: list[list[int]] = []
    last_of_stream: dict[str, int] = {}
    for number, op in enumerate(iteration.ops):
        place[op.name] = number
        last = last_of_stream.get(op.stream)
        last_of_stream[op.stream] = number
        one = [] if last is None else [last]
        for dep in (*op.deps, *beyond.get(op.name, ())):
            if (earlier := place[dep]) not in one:
                one.append(earlier)
        waits.append(one)
    return waits


def simulate_iteration(iteration: Iteration, configs: Mapping[str, CommConfig], model: ContentionModel) -> Timeline:
    """Who runs when in one iteration; a collective that `configs` does not name runs untouched.

    Raises:
        SpaceError: if a configuration cannot run.
        ValueError: if `configs` names what is no collective of the iteration.
    """
    return IterationSimulator(iteration, model).timeline(configs)
