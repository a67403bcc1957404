"""A step of FSDP2 seen as its hooks: which unit is gathered and copied out when."""

from dataclasses import dataclass

from lagom_overlap.workload import CommOp, CompOp, Iteration, MemoryBound
from lagom_overlap.workload.gathers import copies_into
from lagom_overlap.workload.ops import FORWARD_PHASES, data_deps
from lagom_overlap.workload.streams import ALL_GATHER, COMPUTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One gathering of a unit's parameters: the copies into it and the gather (`chain`), the copies out of it.

    `is_forward` tells forward from backward, `batch` is the micro-batch.
    """

    unit: str
    batch: int
    is_forward: bool
    chain: tuple[str, ...]
    copied: tuple[str, ...]

    @property
    def gather(self) -> str:
        """The collective."""
        return self.chain[-1]

    @property
    def parameters(self) -> str:
        """Each gathering is of its own: with what a capture shows, nothing is left unsharded for a later one."""
        return self.gather


def unit_of(gather: CommOp) -> str:
    """The module whose parameters are gathered; "" for the root of a captured model.

    A built step says in the module's name what the operator is.
    """
    return gather.origin.module.removesuffix("_d").removesuffix(".gather")


def visits_of(iteration: Iteration) -> tuple[Visit, ...]:
    """The gatherings on FSDP2's streams, by their first copy out; empty where another framework gathers."""
    ops = {op.name: op for op in iteration.ops}
    place = {op.name: number for number, op in enumerate(iteration.ops)}
    readers: dict[str, list[str]] = {}
    for op in iteration.ops:
        for dep in op.deps:
            readers.setdefault(dep, []).append(op.name)
    visits = []
    for name, copies in copies_into(iteration).items():
        gather = ops[name]
        if not isinstance(gather, CommOp) or gather.stream != ALL_GATHER:
            continue
        copied = tuple(
            reader
            for reader in readers.get(name, ())
            if isinstance(op := ops[reader], CompOp)
            and isinstance(op.work, MemoryBound)
            and op.stream == COMPUTE
            and data_deps(op, ops) == (name,)
        )
        if not copied:
            continue
        visit = Visit(
            unit=unit_of(gather),
            batch=gather.origin.microbatch,
            is_forward=gather.origin.phase in FORWARD_PHASES,
            chain=(*copies, name),
            copied=copied,
        )
        visits.append(visit)
    return tuple(sorted(visits, key=lambda visit: place[visit.copied[0]]))


def units_of(visits: tuple[Visit, ...]) -> tuple[str, ...]:
    """The units that can be told something, in the order of their forward: all but the root."""
    return tuple(dict.fromkeys(v.unit for v in visits if v.is_forward and v.unit not in ("", "root")))
