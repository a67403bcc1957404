"""Event simulation of a whole iteration: any number of streams, waits between them, several collectives at once.

Every stream runs its operators in issue order; an operator starts when its stream is free and what it waits for has
ended. Between two events the same set runs, so its rates are constant; they are computed once per set. Operators whose
ends fall together end together; what becomes ready starts in order of (time, collectives first, issue number).
"""

from collections.abc import Mapping

from lagom_overlap.collective import Collective, CommConfig
from lagom_overlap.cost import CollectiveCost, ContentionModel
from lagom_overlap.errors import SpaceError
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.workload import CommOp, Iteration, Kernel, Work

_UNTOUCHED = CommConfig()


class IterationSimulator:
    """Simulates one iteration under any number of configurations; prices, rates and waits are computed once."""

    def __init__(self, iteration: Iteration, model: ContentionModel) -> None:
        self._iteration = iteration
        self._prices = _Prices(model)
        self._waiting, self._followers = _waits(iteration)
        self._kinds = self._prices.kernel_kinds(iteration)
        self._comms = [(number, op) for number, op in enumerate(iteration.ops) if isinstance(op, CommOp)]
        self._comm_names = {op.name for _, op in self._comms}

    def makespan_s(self, configs: Mapping[str, CommConfig]) -> float:
        """Seconds of the iteration; a collective that `configs` does not name runs untouched.

        Raises:
            SpaceError: if a configuration cannot run.
            ValueError: if `configs` names what is no collective of the iteration.
        """
        return max(self._run(configs)[1], default=0.0)

    def timeline(self, configs: Mapping[str, CommConfig]) -> Timeline:
        """Who runs when; raises what `makespan_s` does."""
        starts, ends = self._run(configs)
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
                    for op, start_s, end_s in zip(self._iteration.ops, starts, ends, strict=True)
                ]
            )
        )

    def _priced(self, configs: Mapping[str, CommConfig]) -> list[int]:
        """Each operator's kind under the configurations."""
        unknown = sorted(configs.keys() - self._comm_names)
        if unknown:
            raise ValueError(f"configs name {unknown[0]!r}, no collective of iteration {self._iteration.name!r}")
        kinds = self._kinds.copy()
        for number, op in self._comms:
            try:
                kinds[number] = self._prices.comm_kind(op.collective, configs.get(op.name, _UNTOUCHED))
            except SpaceError as error:
                raise SpaceError(f"{op.name}: {error}") from error
        return kinds

    def _run(self, configs: Mapping[str, CommConfig]) -> tuple[list[float], list[float]]:
        """Start and end (s) of every operator.

        `running` stays in the order of (collectives first, issue number), which is that of (kind's class, number).
        """
        kinds, waiting, followers = self._priced(configs), self._waiting.copy(), self._followers
        whole_times = self._prices.whole_times
        num_ops, now = len(kinds), 0.0
        starts, ends, left = [0.0] * num_ops, [0.0] * num_ops, [1.0] * num_ops
        running = [number for number, count in enumerate(waiting) if not count]
        while running:
            if len(running) > 1:
                running.sort(key=lambda number: (kinds[number] < 0, number))
            whole = whole_times(tuple([kinds[number] for number in running]))
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


class _Prices:
    """Distinct collective costs (kinds from 0 up) and kernels (kinds from -1 down), and their times together."""

    def __init__(self, model: ContentionModel) -> None:
        self._model = model
        self._costs: list[CollectiveCost] = []
        self._kernels: list[Kernel] = []
        self._comm_kinds: dict[tuple[Collective, CommConfig], int] = {}
        self._known: dict[tuple[int, ...], tuple[float, ...]] = {}

    def comm_kind(self, collective: Collective, config: CommConfig) -> int:
        """The kind of a collective under a configuration.

        Raises:
            SpaceError: if it cannot run.
        """
        key = (collective, config)
        kind = self._comm_kinds.get(key)
        if kind is None:
            self._costs.append(self._model.collective(collective, config))
            kind = self._comm_kinds[key] = len(self._costs) - 1
        return kind

    def kernel_kinds(self, iteration: Iteration) -> list[int]:
        """The kind of every computation of an iteration; 0 for its collectives."""
        # Layers share their works as objects more often than not: an object's identity is found faster than its value.
        by_object: dict[int, int] = {}
        by_value: dict[Work, int] = {}
        kinds: list[int] = []
        for op in iteration.ops:
            if isinstance(op, CommOp):
                kinds.append(0)
                continue
            kind = by_object.get(id(op.work))
            if kind is None:
                kind = by_value.get(op.work)
                if kind is None:
                    self._kernels.append(self._model.kernel(op.work))
                    kind = by_value[op.work] = -len(self._kernels)
                by_object[id(op.work)] = kind
            kinds.append(kind)
        return kinds

    def whole_times(self, kinds: tuple[int, ...]) -> tuple[float, ...]:
        """One time (s) per running operator by its kind, the collectives first."""
        known = self._known.get(kinds)
        if known is None:
            times = self._model.running_times(
                [self._kernels[-1 - kind] for kind in kinds if kind < 0],
                [self._costs[kind] for kind in kinds if kind >= 0],
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


def simulate_iteration(iteration: Iteration, configs: Mapping[str, CommConfig], model: ContentionModel) -> Timeline:
    """Who runs when in one iteration; a collective that `configs` does not name runs untouched.

    Raises:
        SpaceError: if a configuration cannot run.
        ValueError: if `configs` names what is no collective of the iteration.
    """
    return IterationSimulator(iteration, model).timeline(configs)
