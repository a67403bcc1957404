"""Event simulation of a whole iteration: any number of streams, waits between them, several collectives at once.

Every stream runs its operators in issue order; an operator starts when its stream is free and what it waits for has
ended. Between two events the same set runs, so its rates are constant; they are computed once per set. Operators whose
ends fall together end together; what becomes ready starts in order of (time, collectives first, issue number).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lagom_overlap.collective import CommConfig
from lagom_overlap.cost import CollectiveCost, ContentionModel
from lagom_overlap.errors import SpaceError
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.workload import CommOp, Iteration, Kernel, Work

_UNTOUCHED = CommConfig()


@dataclass(frozen=True, slots=True)
class _Priced:
    """Distinct collective costs and kernels of an iteration; each operator's number among them, kernels last."""

    costs: list[CollectiveCost]
    kernels: list[Kernel]
    kinds: list[int]


def _price(iteration: Iteration, configs: Mapping[str, CommConfig], model: ContentionModel) -> _Priced:
    unknown = sorted(set(configs) - {op.name for op in iteration.comms})
    if unknown:
        raise ValueError(f"configs name {unknown[0]!r}, no collective of iteration {iteration.name!r}")
    cost_places: dict[object, int] = {}
    costs: list[CollectiveCost] = []
    places: list[int] = []
    for call in iteration.comms:
        key = (call.collective, configs.get(call.name, _UNTOUCHED))
        if key not in cost_places:
            cost_places[key] = len(costs)
            try:
                costs.append(model.collective(*key))
            except SpaceError as error:
                raise SpaceError(f"{call.name}: {error}") from error
        places.append(cost_places[key])
    # Layers share their works as objects more often than not: an object's identity is found faster than its value.
    by_object: dict[int, int] = {}
    by_value: dict[Work, int] = {}
    kernels: list[Kernel] = []
    kinds: list[int] = []
    comm = iter(places)
    for op in iteration.ops:
        if isinstance(op, CommOp):
            kinds.append(next(comm))
            continue
        kind = by_object.get(id(op.work))
        if kind is None:
            kind = by_value.get(op.work)
            if kind is None:
                kind = by_value[op.work] = len(costs) + len(kernels)
                kernels.append(model.kernel(op.work))
            by_object[id(op.work)] = kind
        kinds.append(kind)
    return _Priced(costs, kernels, kinds)


class _Clock:
    """The whole time of every running operator, computed once per multiset of what runs."""

    def __init__(self, priced: _Priced, model: ContentionModel) -> None:
        self._priced = priced
        self._model = model
        self._known: dict[tuple[int, ...], tuple[float, ...]] = {}

    def whole_times(self, kinds: tuple[int, ...]) -> tuple[float, ...]:
        """One time (s) per running operator by its kind, the collectives first."""
        known = self._known.get(kinds)
        if known is None:
            costs, kernels = self._priced.costs, self._priced.kernels
            num_costs = len(costs)
            times = self._model.running_times(
                [kernels[kind - num_costs] for kind in kinds if kind >= num_costs],
                [costs[kind] for kind in kinds if kind < num_costs],
            )
            known = self._known[kinds] = (*times.comm_s, *times.kernel_s)
        return known


def _waits(iteration: Iteration) -> tuple[list[int], list[list[int]]]:
    """How many operators each one waits for (its stream's last and its `deps`), and who waits for it."""
    place: dict[str, int] = {}
    waiting: list[int] = []
    followers: list[list[int]] = []
    last_of_stream: dict[str, int] = {}
    for number, op in enumerate(iteration.ops):
        place[op.name] = number
        followers.append([])
        last = last_of_stream.get(op.stream)
        last_of_stream[op.stream] = number
        waits = [] if last is None else [last]
        if op.deps:
            waits = list({*waits, *[place[dep] for dep in op.deps]})
        waiting.append(len(waits))
        for earlier in waits:
            followers[earlier].append(number)
    return waiting, followers


def _run(priced: _Priced, waits: tuple[list[int], list[list[int]]], model: ContentionModel) -> tuple[list[float], ...]:
    """Start and end (s) of every operator.

    `running` stays in the order of (collectives first, issue number), which is that of (kind's class, number).
    """
    waiting, followers = waits
    kinds, num_costs, clock = priced.kinds, len(priced.costs), _Clock(priced, model)
    num_ops, now = len(kinds), 0.0
    starts, ends, left = [0.0] * num_ops, [0.0] * num_ops, [1.0] * num_ops
    running = [number for number, count in enumerate(waiting) if not count]
    while running:
        if len(running) > 1:
            running.sort(key=lambda number: (kinds[number] >= num_costs, number))
        whole = clock.whole_times(tuple([kinds[number] for number in running]))
        until_end = [left[number] * time_s for number, time_s in zip(running, whole, strict=True)]
        step_s = min(until_end)
        now += step_s
        still: list[int] = []
        for number, time_s, end_s in zip(running, whole, until_end, strict=True):
            if end_s > step_s:
                left[number] = max(0.0, left[number] - step_s / time_s)
                still.append(number)
        for number, end_s in zip(running, until_end, strict=True):
            if end_s > step_s:
                continue
            ends[number] = now
            for follower in followers[number]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    starts[follower] = now
                    still.append(follower)
        running = still
    return starts, ends


def simulate_iteration(iteration: Iteration, configs: Mapping[str, CommConfig], model: ContentionModel) -> Timeline:
    """Who runs when in one iteration; a collective that `configs` does not name runs untouched.

    Raises:
        SpaceError: if a configuration cannot run.
        ValueError: if `configs` names what is no collective of the iteration.
    """
    priced = _price(iteration, configs, model)
    starts, ends = _run(priced, _waits(iteration), model)
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
                for op, start_s, end_s in zip(iteration.ops, starts, ends, strict=True)
            ]
        )
    )
