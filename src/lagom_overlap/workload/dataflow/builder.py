"""Operators of a step as they are added; what they read becomes what they wait for."""

from collections.abc import Sequence

from lagom_overlap.collective import Collective
from lagom_overlap.workload.iteration import Buffer
from lagom_overlap.workload.ops import CommOp, CompOp, Op, Origin, Phase, Work
from lagom_overlap.workload.rewrite.pieces import output_bytes
from lagom_overlap.workload.sharding import ShardSpec


def _unique(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))


class StepBuilder:
    """Collects operators in program order."""

    def __init__(self) -> None:
        self.ops: list[Op] = []

    def comp(self, name: str, work: Work, origin: Origin, shards: ShardSpec, also: Sequence[str] = ()) -> str:
        """A computation that reads the sources of `shards` and waits for `also`; its name."""
        deps = _unique([*(use.source for use in shards.inputs), *also])
        self.ops.append(CompOp(name=name, work=work, deps=deps, origin=origin, shards=shards))
        return name

    def comm(
        self,
        name: str,
        collective: Collective,
        group: str,
        *,
        origin: Origin,
        deps: Sequence[str],
        shards: ShardSpec | None = None,
    ) -> str:
        """A collective; its name."""
        self.ops.append(
            CommOp(
                name=name, collective=collective, communicator=group, deps=_unique(deps), origin=origin, shards=shards
            )
        )
        return name

    def buffers(self) -> tuple[Buffer, ...]:
        """Gathered parameters, and what forward leaves for backward."""
        readers: dict[str, list[Op]] = {}
        for op in self.ops:
            for dep in op.deps:
                readers.setdefault(dep, []).append(op)
        made = []
        for op in self.ops:
            users = readers.get(op.name, [])
            gathers = isinstance(op, CommOp) and op.communicator == "fsdp" and not op.deps
            later = (Phase.BACKWARD, Phase.WEIGHT_GRAD)
            kept = op.origin.phase is Phase.FORWARD and any(user.origin.phase in later for user in users)
            if users and (gathers or kept):
                names = tuple(user.name for user in users)
                made.append(Buffer(name=f"{op.name}.kept", num_bytes=output_bytes(op), maker=op.name, users=names))
        return tuple(made)
