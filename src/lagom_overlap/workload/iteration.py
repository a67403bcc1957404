"""One training iteration as a graph: operators in issue order on streams, waits between streams."""

from dataclasses import dataclass

from lagom_overlap.errors import JobError
from lagom_overlap.workload.ops import CommOp, CompOp, Op


@dataclass(frozen=True, slots=True)
class Iteration:
    """Operators of one rank in the order in which the host issues them.

    Operators of one stream run in that order; `deps` are waits for operators issued earlier (on any stream).
    """

    name: str
    ops: tuple[Op, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for op in self.ops:
            if op.name in seen:
                raise JobError(f"iteration {self.name!r}: operator {op.name!r} occurs twice")
            missing = [dep for dep in op.deps if dep not in seen]
            if missing:
                raise JobError(f"iteration {self.name!r}: {op.name!r} waits for {missing[0]!r}, not issued before it")
            seen.add(op.name)

    @property
    def computations(self) -> tuple[CompOp, ...]:
        """The computations in issue order."""
        return tuple(op for op in self.ops if isinstance(op, CompOp))

    @property
    def comms(self) -> tuple[CommOp, ...]:
        """The collectives in issue order."""
        return tuple(op for op in self.ops if isinstance(op, CommOp))
