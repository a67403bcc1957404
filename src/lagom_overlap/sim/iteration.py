"""Event simulation of a whole iteration: any number of streams, waits between them, several collectives at once.

Every stream runs its operators in issue order; an operator starts when its stream is free and what it waits for has
ended. Between two events the same set runs, so its rates are constant; they are computed once per set. Operators whose
ends fall together end together; what becomes ready starts in order of (time, collectives first, issue number).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lagom_overlap.collective import CommConfig
from lagom_overlap.cost import CollectiveCost, ContentionModel
from lagom_overlap.errors import SpaceError
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.workload import CompOp, Iteration, Kernel

_UNTOUCHED = CommConfig()


@dataclass(frozen=True, slots=True)
class _Priced:
    """Distinct kernels and collective costs of an iteration, and each operator's number among them."""

    kernels: list[Kernel]
    costs: list[CollectiveCost]
    kinds: list[int]
    is_comp: list[bool]


def _price(iteration: Iteration, configs: Mapping[str, CommConfig], model: ContentionModel) -> _Priced:
    unknown = sorted(set(configs) - {op.name for op in iteration.comms})
    if unknown:
        raise ValueError(f"configs name {unknown[0]!r}, no collective of iteration {iteration.name!r}")
    kernel_places: dict[object, int] = {}
    cost_places: dict[object, int] = {}
    kernels: list[Kernel] = []
    costs: list[CollectiveCost] = []
    kinds: list[int] = []
    for op in iteration.ops:
        if isinstance(op, CompOp):
            if op.work not in kernel_places:
                kernel_places[op.work] = len(kernels)
                kernels.append(model.kernel(op.work))
            kinds.append(kernel_places[op.work])
            continue
        key = (op.collective, configs.get(op.name, _UNTOUCHED))
        if key not in cost_places:
            cost_places[key] = len(costs)
            try:
                costs.append(model.collective(*key))
            except SpaceError as error:
                raise SpaceError(f"{op.name}: {error}") from error
        kinds.append(cost_places[key])
    return _Priced(kernels, costs, kinds, [isinstance(op, CompOp) for op in iteration.ops])


class _Clock:
    """The whole time of every running operator, computed once per multiset of what runs."""

    def __init__(self, priced: _Priced, model: ContentionModel) -> None:
        self._priced = priced
        self._model = model
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, ...]] = {}

    def whole_times(self, running: Sequence[int]) -> tuple[float, ...]:
        """One time (s) per running operator; `running` lists the collectives first."""
        priced = self._priced
        comms = tuple([priced.kinds[place] for place in running if not priced.is_comp[place]])
        comps = tuple([priced.kinds[place] for place in running if priced.is_comp[place]])
        known = self._known.get((comms, comps))
        if known is None:
            times = self._model.running_times([priced.kernels[k] for k in comps], [priced.costs[c] for c in comms])
            known = self._known[comms, comps] = (*times.comm_s, *times.kernel_s)
        return known


class _Queue:
    """Which operators may start: the head of each stream once everything it waits for has ended."""

    def __init__(self, iteration: Iteration) -> None:
        place = {op.name: number for number, op in enumerate(iteration.ops)}
        self._waiting = []
        self._followers: list[list[int]] = [[] for _ in iteration.ops]
        last_of_stream: dict[str, int] = {}
        for number, op in enumerate(iteration.ops):
            waits = {place[dep] for dep in op.deps}
            if op.stream in last_of_stream:
                waits.add(last_of_stream[op.stream])
            last_of_stream[op.stream] = number
            self._waiting.append(len(waits))
            for earlier in waits:
                self._followers[earlier].append(number)

    def first(self) -> list[int]:
        """The operators that wait for nothing."""
        return [number for number, waits in enumerate(self._waiting) if not waits]

    def ended(self, number: int) -> list[int]:
        """The operators that an end lets start."""
        ready = []
        for follower in self._followers[number]:
            self._waiting[follower] -= 1
            if not self._waiting[follower]:
                ready.append(follower)
        return ready


def simulate_iteration(iteration: Iteration, configs: Mapping[str, CommConfig], model: ContentionModel) -> Timeline:
    """Who runs when in one iteration; a collective that `configs` does not name runs untouched.

    Raises:
        SpaceError: if a configuration cannot run.
        ValueError: if `configs` names what is no collective of the iteration.
    """
    priced = _price(iteration, configs, model)
    clock, queue = _Clock(priced, model), _Queue(iteration)
    num_ops = len(iteration.ops)
    starts, ends, left = [0.0] * num_ops, [0.0] * num_ops, [1.0] * num_ops
    running = queue.first()
    now = 0.0
    while running:
        running.sort(key=lambda number: (priced.is_comp[number], number))
        whole = clock.whole_times(running)
        until_end = [left[number] * time_s for number, time_s in zip(running, whole, strict=True)]
        step_s = min(until_end)
        now += step_s
        still, ready = [], []
        for number, time_s, end_s in zip(running, whole, until_end, strict=True):
            if end_s <= step_s:
                ends[number] = now
                ready += queue.ended(number)
            else:
                left[number] = max(0.0, left[number] - step_s / time_s)
                still.append(number)
        for number in ready:
            starts[number] = now
        running = still + ready
    return Timeline(
        tuple(
            Span(
                name=op.name,
                kind=SpanKind.COMP if priced.is_comp[number] else SpanKind.COMM,
                stream=op.stream,
                start_s=starts[number],
                end_s=ends[number],
            )
            for number, op in enumerate(iteration.ops)
        )
    )
