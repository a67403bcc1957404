"""Operators of a step as they are issued: what they read becomes data flow, what streams wait for becomes waits."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from lagom_overlap.collective import Collective
from lagom_overlap.workload.clock import StreamClock
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.iteration import Buffer, Iteration
from lagom_overlap.workload.ops import CommOp, CompOp, Op, Origin, Phase, Work
from lagom_overlap.workload.rewrite.pieces import output_bytes
from lagom_overlap.workload.sharding import ShardSpec
from lagom_overlap.workload.streams import COMPUTE

_LATER = (Phase.BACKWARD, Phase.WEIGHT_GRAD, Phase.RECOMPUTE)


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([name for name in names if name]))


class StepGraph:
    """Collects operators in the order in which the host issues them, under CUDA's rules of streams and events."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.clock = StreamClock()
        self._place: dict[str, int] = {}
        self._waits: list[set[int]] = []
        self._gathered: set[str] = set()
        self._together: dict[str, tuple[str, ...]] = {}
        self._works: dict[Work, Work] = {}

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
        sources = () if shards is None else [use.source for use in shards.inputs]
        self._waits.append(self.clock.issue(len(self.ops), stream))
        work = self._works.setdefault(work, work)  # one object for equal works: what looks them up needs no comparison
        return self._add(
            CompOp(
                name=name, work=work, stream=stream, deps=self._read([*sources, *deps]), origin=origin, shards=shards
            )
        )

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
        waits |= self.clock.issue(number, stream or group) | self.clock.communicate(number, group)
        self._waits.append(waits)
        return self._add(
            CommOp(
                name=name,
                collective=collective,
                stream=stream or group,
                communicator=group,
                deps=self._read(deps),
                origin=origin,
                shards=shards,
            )
        )

    def together(self, names: Sequence[str]) -> str:
        """A name for the results of several operators of one stream: that of the last, whose readers read them all."""
        if len(names) > 1:
            self._together[names[-1]] = tuple(names)
        return names[-1]

    def _read(self, names: Iterable[str]) -> tuple[str, ...]:
        return _unique(each for name in names for each in self._together.get(name, (name,)))

    def _add(self, op: Op) -> str:
        self._place[op.name] = len(self.ops)
        self.ops.append(op)
        return op.name

    def hold_back(self, stream: str, names: Iterable[str]) -> None:
        """What `stream` is told next waits for these operators."""
        self.clock.hold_back(stream, [self._place[name] for name in names])

    def gathered(self, name: str) -> None:
        """`name` makes gathered parameters, which live until their last reader."""
        self._gathered.add(name)

    def _buffers(self) -> tuple[Buffer, ...]:
        """Gathered parameters, and what forward leaves for backward."""
        users: defaultdict[str, list[str]] = defaultdict(list)
        late: set[str] = set()
        for op in self.ops:
            for dep in op.deps:
                users[dep].append(op.name)
            if op.origin.phase in _LATER:
                late.update(op.deps)
        return tuple(
            Buffer(name=f"{op.name}.kept", num_bytes=output_bytes(op), maker=op.name, users=tuple(users[op.name]))
            for op in self.ops
            if (op.name in late and op.origin.phase is Phase.FORWARD)
            or (op.name in self._gathered and op.name in users)
        )

    def finish(
        self, name: str, *, num_ranks: int, resident_bytes: int, groups: Mapping[str, tuple[int, ...]]
    ) -> IssuedStep:
        """The step, as a planner may reorder it and as the framework issues it."""
        waits = {}
        for op, waited in zip(self.ops, self._waits, strict=True):
            if waited:
                names = [self.ops[place].name for place in sorted(waited)]
                beyond = tuple([name for name in names if name not in op.deps])
                if beyond:
                    waits[op.name] = beyond
        return IssuedStep(
            iteration=Iteration(
                name, tuple(self.ops), is_dataflow=True, buffers=self._buffers(), resident_bytes=resident_bytes
            ),
            num_ranks=num_ranks,
            groups=groups,
            waits=waits,
        )
