"""What `lagom capture` captured. Format of its JSON: docs/formats.md."""

from dataclasses import InitVar, dataclass
from pathlib import Path

from lagom_overlap.results.base import Result, Row
from lagom_overlap.units import format_bytes, format_memory, format_seconds
from lagom_overlap.workload import MemoryBound
from lagom_overlap.workload.issued import IssuedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedCommunicator:
    """One communicator of the captured rank: its ranks, its collectives, what they move (whole tensors)."""

    name: str
    ranks: tuple[int, ...]
    num_comms: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class CaptureResult(Result):
    """A captured step of one rank; `captured` is the step itself, found again as `capture`."""

    tool: str = "lagom capture"
    name: str
    num_ranks: int
    rank: int
    num_ops: int
    num_comms: int
    num_shardable: int
    flops: float
    resident_bytes: int
    communicators: tuple[CapturedCommunicator, ...]
    capture_s: float
    notes: tuple[str, ...]
    files: tuple[Path, ...]
    captured: InitVar[IssuedStep]

    def __post_init__(self, captured: IssuedStep) -> None:
        object.__setattr__(self, "_capture", captured)

    @property
    def capture(self) -> IssuedStep:
        """The step: operators, collectives and communicators."""
        capture: IssuedStep = self.behind("_capture", "captured step")
        return capture

    @classmethod
    def of(cls, capture: IssuedStep, *, rank: int, capture_s: float, files: tuple[Path, ...]) -> "CaptureResult":
        """The step with its sums."""
        iteration = capture.iteration
        comms = {name: [comm for comm in iteration.comms if comm.communicator == name] for name in capture.groups}
        return cls(
            name=iteration.name,
            num_ranks=capture.num_ranks,
            rank=rank,
            num_ops=len(iteration.ops),
            num_comms=len(iteration.comms),
            num_shardable=sum(op.shards is not None for op in iteration.ops),
            flops=sum(
                getattr(op.work, "flops", 0.0) for op in iteration.computations if not isinstance(op.work, MemoryBound)
            ),
            resident_bytes=iteration.resident_bytes,
            communicators=tuple(
                CapturedCommunicator(
                    name=name,
                    ranks=ranks,
                    num_comms=len(comms[name]),
                    num_bytes=sum(comm.collective.num_bytes for comm in comms[name]),
                )
                for name, ranks in capture.groups.items()
            ),
            capture_s=capture_s,
            notes=capture.notes,
            files=files,
            captured=capture,
        )

    def summary(self) -> str:
        """What was captured, its communicators, the caveats and the file."""
        lines = [
            f"{self.name}: rank {self.rank} of {self.num_ranks}, captured in {format_seconds(self.capture_s)}",
            f"  {self.num_ops} operators, {self.num_comms} collectives, {self.num_shardable} can be cut; "
            f"{self.flops / 1e12:.3g} TFLOP; {format_memory(self.resident_bytes)} stay in memory",
        ]
        lines += [
            f"  {comm.name}: {len(comm.ranks)} ranks, {comm.num_comms} collectives, {format_bytes(comm.num_bytes)}"
            for comm in self.communicators
        ]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([*lines, *(f"Written: {path}" for path in self.files)])

    def table(self) -> list[Row]:
        """One row per communicator."""
        return [
            {
                "communicator": comm.name,
                "num_ranks": len(comm.ranks),
                "num_comms": comm.num_comms,
                "num_bytes": comm.num_bytes,
            }
            for comm in self.communicators
        ]
