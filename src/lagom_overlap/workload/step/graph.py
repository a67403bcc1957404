"""Operators of a step as they are issued: what they read becomes data flow, what streams wait for becomes waits.

An operator is known by its name while a step is built. What it waits for is kept as distances to operators issued
before it, which are the same in every layer: a part of a layer that was recorded once (`tape`) is repeated by extending
lists.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lagom_overlap.collective import Collective
from lagom_overlap.workload.clock import ClockState, StreamClock
from lagom_overlap.workload.ops import CommOp, CompOp, Op, Origin, Work
from lagom_overlap.workload.sharding import ShardSpec
from lagom_overlap.workload.step.rolled import Distances, Own, RolledStep, Rows, Scope
from lagom_overlap.workload.streams import COMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Operators that were recorded once, to be issued again in other layers and micro-batches.

    A place from 0 up is an operator of the segment; one below 0 is `outside[-1 - place]`: what was issued before it,
    known when it is issued again. `open_waits` and `open_order` are the rows that have such: whose, what is known of
    the row, and which of `outside` belong to it. `clock` is what the segment changes in the state of streams,
    `together` the names that stand for several results.
    """

    ops: Sequence[Op]
    numbers: Mapping[str, int]
    rows: Rows
    open_waits: Sequence[tuple[int, Distances, Sequence[int]]]
    open_order: Sequence[tuple[int, Distances, Sequence[int]]]
    outside: Sequence[tuple[str, str]]
    clock: ClockState
    together: Mapping[str, tuple[str, ...]]


class Places(dict[str, int]):
    """The place of every operator by its name; those of repeated segments are looked up when they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.repeated: defaultdict[str, list[tuple[int, Mapping[str, int]]]] = defaultdict(list)

    def __missing__(self, name: str) -> int:
        batch, layer, local = name.split(".", 2)
        for base, numbers in self.repeated[f"{batch}.{layer}."]:
            if local in numbers:
                self[name] = base + numbers[local]
                return self[name]
        raise KeyError(name)


class StepGraph:
    """Collects operators in the order in which the host issues them, under CUDA's rules of streams and events.

    `works` are objects to use for equal works: what looks them up needs no comparison.
    """

    def __init__(self, works: dict[Work, Work] | None = None) -> None:
        self.ops: list[Op] = []
        self.clock = StreamClock()
        self.works: dict[Work, Work] = {} if works is None else works
        self._rows = Rows([], [], [])
        self._layers: list[int] = []
        self._batches: list[int] = []
        self._shared: dict[tuple[object, ...], Op] = {}
        self._own: dict[int, Own] = {}
        self._scopes: list[tuple[range, Scope]] = []
        self._place = Places()
        self._gathered: set[str] = set()
        self._ordered: defaultdict[str, set[str]] = defaultdict(set)  # what streams have waited for to read
        self._together: dict[str, tuple[str, ...]] = {}

    def comp(
        self,
        name: str,
        work: Work,
        origin: Origin,
        deps: Sequence[str],
        *,
        shards: ShardSpec | None = None,
        stream: str = COMPUTE,
    ) -> str:
        """A computation that reads the sources of `shards` and waits for `deps`; its name."""
        deps = deps if shards is None else [*[use.source for use in shards.inputs], *deps]
        work = self.works.setdefault(work, work)
        key = id(work), stream, origin.phase
        op = self._alike(key, origin, shards)
        if op is None:
            op = self._shared[key] = CompOp(name=name, work=work, stream=stream, origin=origin, shards=shards)
        last = self.clock.last(stream)
        self._own[len(self.ops)] = name, origin, shards
        return self._add(name, op, deps, self.clock.issue(len(self.ops), stream), last)

    def _alike(self, key: tuple[object, ...], origin: Origin, shards: ShardSpec | None) -> Op | None:
        """What was issued in another layer with the same work or collective, stream and phase, if anything was."""
        return None if origin.layer is None or shards is not None else self._shared.get(key)

    def comm(
        self,
        name: str,
        collective: Collective,
        group: str,
        *,
        origin: Origin,
        deps: Sequence[str],
        stream: str = "",
        shards: ShardSpec | None = None,
    ) -> str:
        """A collective on a stream of the framework's, by default on its communicator's; its name.

        A communicator runs one collective at a time. NCCL's own stream waits for all that computes so far.
        """
        number = len(self.ops)
        waits = set() if stream else set(self.clock.so_far(COMPUTE))
        stream = stream or group
        last = self.clock.last(stream)
        waits |= self.clock.issue(number, stream) | self.clock.communicate(number, group)
        key = id(collective), group, stream, origin.phase
        op = self._alike(key, origin, shards)
        if op is None:
            op = self._shared[key] = CommOp(
                name=name, collective=collective, stream=stream, communicator=group, origin=origin, shards=shards
            )
        self._own[number] = name, origin, shards
        return self._add(name, op, deps, waits, last)

    def together(self, names: Sequence[str]) -> str:
        """A name for the results of several operators of one stream: that of the last, whose readers read them all."""
        if len(names) > 1:
            self._together[names[-1]] = tuple(names)
        return names[-1]

    def _read(self, names: Sequence[str]) -> tuple[str, ...]:
        """What is read by these names, each once; "" is nothing."""
        if not names:
            return ()
        together = self._together
        return tuple(dict.fromkeys([each for name in names if name for each in together.get(name, (name,))]))

    def _stream_of(self, name: str) -> str:
        """The stream of an operator, "" if it is not known."""
        return self.ops[self._place[name]].stream

    def _add(self, name: str, op: Op, deps: Sequence[str], waits: set[int], last: int | None) -> str:
        at, origin, rows = len(self.ops), self._own[len(self.ops)][1], self._rows
        reads = self._read(deps)
        order = () if last is None else (last - at,)
        known = self._ordered[op.stream]
        for read in reads:
            if read not in known and self._stream_of(read) != op.stream:
                known.add(read)
                order = (*order, self._place[read] - at)
        rows.reads.append(reads)
        rows.waits.append(tuple([place - at for place in waits]) if waits else ())
        rows.order.append(order)
        self._layers.append(-1 if origin.layer is None else origin.layer)
        self._batches.append(origin.microbatch)
        self._place[name] = at
        self.ops.append(op)
        return name

    def repeat(self, segment: Segment, scope: Scope) -> None:
        """Issues a segment again."""
        base, num, rows = len(self.ops), len(segment.ops), self._rows
        known = [self._outside(kind, name, scope) for kind, name in segment.outside]

        def places(place: int) -> Sequence[int]:
            return (base + place,) if place >= 0 else known[-1 - place]

        rows.reads.extend(segment.rows.reads)
        rows.waits.extend(segment.rows.waits)
        rows.order.extend(segment.rows.order)
        for mine, opened in ((rows.waits, segment.open_waits), (rows.order, segment.open_order)):
            for number, row, others in opened:
                at = base + number
                mine[at] = (*row, *[place - at for other in others for place in known[other]])
        self.clock.go_on(segment.clock, places)
        self._place.repeated[scope.prefix].append((base, segment.numbers))
        for name, names in segment.together.items():
            self._together[scope.prefix + name] = tuple([scope.prefix + each for each in names])
        self._layers += [scope.layer] * num
        self._batches += [scope.batch] * num
        self._scopes.append((range(base, base + num), scope))
        self.ops += segment.ops

    def _outside(self, kind: str, name: str, scope: Scope) -> Sequence[int]:
        match kind:
            case "name":
                return [self._place[each] for each in self._read([scope.name_of(name)])]
            case "last":
                outside = self.clock.last(name)
            case "communicator":
                outside = self.clock.last_of_communicator(name)
            case _:
                return tuple(self.clock.pending(name))
        return () if outside is None else (outside,)

    def hold_back(self, stream: str, names: Iterable[str]) -> None:
        """What `stream` is told next waits for these operators."""
        self.clock.hold_back(stream, [self._place[name] for name in names])

    def gathered(self, name: str) -> None:
        """`name` makes gathered parameters, which live until their last reader."""
        self._gathered.add(name)

    def finish(
        self, name: str, *, num_ranks: int, resident_bytes: int, groups: Mapping[str, tuple[int, ...]]
    ) -> RolledStep:
        """The step as it was issued."""
        return RolledStep(
            name=name,
            ops=self.ops,
            rows=self._rows,
            layers=self._layers,
            batches=self._batches,
            own=self._own,
            scopes=self._scopes,
            gathered=frozenset(self._gathered),
            together=self._together,
            num_ranks=num_ranks,
            groups=groups,
            resident_bytes=resident_bytes,
        )
