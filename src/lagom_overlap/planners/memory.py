"""Memory as precedence arcs: with them every schedule of a graph keeps the prefetch depth and the limit.

Spec, planners section 5.5. Two kinds of arcs:

- Depth D: of the gathered parameter groups, in the order of their first use, group k is gathered once group k - D is
  released. In each residue class modulo D at most one group is then held: D in all. Where copies go before the gather
  (FSDP2's copy-in writes into the gathered buffer), they wait too.
- Limit M: buffers in the order in which a lean serial order makes them. Maker k waits for the release of the first of
  those that the lean order releases before it, as many as it takes for what was made up to k to fit without them. Those
  sets are nested, so at every moment all that is held fits: what the last maker started waits for is gone, and what is
  not yet made is counted as held. Such arcs exist exactly if the lean order itself fits.

The lean order is program order with every gather moved down to its first use. Departure from the specification, whose
arcs need buffers that are released in the order of allocation (parameters, but not activations).
"""

from collections.abc import Iterable, Mapping, Sequence

from lagom_overlap.errors import JobError
from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph
from lagom_overlap.units import format_memory
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.gathers import begins_of_gathers, copies_into, first_need, users_of_gathers


def depth_arcs(iteration: Iteration, depth: int) -> list[tuple[str, str]]:
    """Arcs (from, to) that hold at most `depth` gathered parameter groups at once.

    Where a group is still used after the first need of the one `depth` further on (parameters kept for the backward
    pass), program order itself holds more, and so may the plan.
    """
    place = {op.name: number for number, op in enumerate(iteration.ops)}
    need = first_need(iteration)
    begins, users = begins_of_gathers(iteration), users_of_gathers(iteration)
    gathers = list(begins)
    arcs = []
    for released, gather in zip(gathers, gathers[depth:], strict=False):
        if all(place[user] < need[gather] for user in users[released]):
            arcs += [(user, begins[gather]) for user in users[released]]
    return arcs


def lean_order(iteration: Iteration) -> list[int]:
    """Program order with parameter gathers, and the copies before them, moved down to where they are first needed."""
    place = {op.name: number for number, op in enumerate(iteration.ops)}
    need = first_need(iteration)
    late: dict[int, list[int]] = {}
    moved: set[int] = set()
    for gather, copies in copies_into(iteration).items():
        own = {place[gather], *(place[copy] for copy in copies)}
        chain = [*(place[copy] for copy in copies if need[copy] in own), place[gather]]
        late.setdefault(need[gather], []).extend(chain)
        moved.update(chain)
    order: list[int] = []
    for task in range(len(place) + 1):
        order += late.get(task, [])
        if task < len(place) and task not in moved:
            order.append(task)
    return order


def limit_arcs(iteration: Iteration, limit_bytes: int) -> list[tuple[str, str]]:
    """Arcs (from, to) with which every schedule holds at most `limit_bytes`, resident memory included.

    Raises:
        JobError: if the lean order itself, one operator after the other, holds more; says by how much.
    """
    order = lean_order(iteration)
    refuse_beyond("even one operator after the other", peak_of_order(iteration, order), limit_bytes)
    moment = {iteration.ops[task].name: number for number, task in enumerate(order)}
    in_order = sorted(iteration.buffers, key=lambda buffer: moment[buffer.maker])
    released = sorted((b for b in in_order if b.users), key=lambda buffer: max(moment[user] for user in buffer.users))
    last = _LastTasks(iteration, order)
    arcs: list[tuple[str, str]] = []
    held_bytes, gone = iteration.resident_bytes, 0
    for buffer in in_order:
        held_bytes += buffer.num_bytes
        while held_bytes > limit_bytes:
            held_bytes -= released[gone].num_bytes
            last.add(released[gone].users)
            gone += 1
        arcs += [(task, buffer.maker) for task in last.names]
    return arcs


class _LastTasks:
    """The least set of tasks after which all tasks added have ended: those that are ancestors of none of them."""

    def __init__(self, iteration: Iteration, order: Sequence[int]) -> None:
        self._number = {iteration.ops[task].name: number for number, task in enumerate(order)}
        self._ancestors: dict[str, int] = {}  # a bit per task
        for task in order:
            op, bits = iteration.ops[task], 0
            for dep in op.deps:
                bits |= self._ancestors[dep] | 1 << self._number[dep]
            self._ancestors[op.name] = bits
        self._covered = 0
        self.names: list[str] = []

    def add(self, tasks: Iterable[str]) -> None:
        """Adds tasks."""
        for task in tasks:
            bit = 1 << self._number[task]
            if not self._covered & bit:
                ahead = self._ancestors[task]
                self.names = [name for name in self.names if not ahead >> self._number[name] & 1]
                self.names.append(task)
                self._covered |= ahead | bit


def refuse_beyond(who: str, needed_bytes: int, limit_bytes: int | None) -> None:
    """Says by how much the limit (None: there is none) is exceeded.

    Raises:
        JobError: if it is.
    """
    if limit_bytes is not None and needed_bytes > limit_bytes:
        over = needed_bytes - limit_bytes
        raise JobError(
            f"memory_limit is {limit_bytes} bytes, but {who} needs {needed_bytes}: {over} bytes too many"
            f" ({format_memory(over)})"
        )


def fits(iteration: Iteration, limit_bytes: int | None) -> bool:
    """The lean order, one operator after the other, holds no more than the limit (None: there is none).

    A rewritten step may need more than the step itself: inputs are held until the last piece has run.
    """
    return limit_bytes is None or peak_of_order(iteration, lean_order(iteration)) <= limit_bytes


def peak_of_order(iteration: Iteration, order: Sequence[int]) -> int:
    """The most bytes held if operators run one after the other in this order, resident memory included."""
    moment = {iteration.ops[task].name: number for number, task in enumerate(order)}
    return peak_of_spans(iteration, {name: (at, at + 1) for name, at in moment.items()})


def peak_of(iteration: Iteration, graph: TaskGraph, schedule: Schedule) -> int:
    """The most bytes held in a schedule of the iteration's graph, resident memory included."""
    spans = {
        name: (start, start + ticks)
        for name, start, ticks in zip(graph.names, schedule.starts, graph.ticks, strict=True)
    }
    return peak_of_spans(iteration, spans)


def peak_of_spans(iteration: Iteration, spans: Mapping[str, tuple[float, float]]) -> int:
    """The most bytes held where operators start and end so, by name, resident memory included."""
    changes: list[tuple[float, int]] = []
    for buffer in iteration.buffers:
        changes.append((spans[buffer.maker][0], buffer.num_bytes))
        if buffer.users:
            changes.append((max(spans[user][1] for user in buffer.users), -buffer.num_bytes))
    num_bytes = peak = iteration.resident_bytes
    for _, change in sorted(changes):  # at one moment, releases come first
        num_bytes += change
        peak = max(peak, num_bytes)
    return peak


def with_memory(
    graph: TaskGraph,
    iteration: Iteration,
    *,
    depth: int | None,
    limit_bytes: int | None,
    more: Iterable[tuple[str, str]] = (),
) -> TaskGraph:
    """The graph with the arcs of a prefetch depth and a limit (None: without), and more arcs (from, to).

    Raises:
        JobError: if nothing fits in the limit; says by how much.
    """
    arcs = list(more)
    if depth is not None:
        arcs += depth_arcs(iteration, depth)
    if limit_bytes is not None:
        arcs += limit_arcs(iteration, limit_bytes)
    place = {name: number for number, name in enumerate(graph.names)}
    return graph.with_arcs(_numbered(arcs, place)) if arcs else graph


def _numbered(arcs: Iterable[tuple[str, str]], place: dict[str, int]) -> list[tuple[int, int]]:
    return [(place[source], place[target]) for source, target in dict.fromkeys(arcs)]
