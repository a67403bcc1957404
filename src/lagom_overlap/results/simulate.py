"""What `lagom simulate` found. Format of its JSON: docs/formats.md."""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import ClassVar

from lagom_overlap.results.base import Drawn, Row
from lagom_overlap.sim.step_parts import CommTimes
from lagom_overlap.sim.what_if import WhatIf, whether
from lagom_overlap.timeline import Timeline
from lagom_overlap.units import format_memory, format_seconds
from lagom_overlap.workload.parallel import StageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStage:
    """One pipeline stage: what its iteration is spent on, and the memory of one GPU at its peak.

    `step_s` is its step of one micro-batch with nothing to wait for, which `lagom plan` begins with; without a pipeline
    the whole iteration.
    """

    stage: int
    step_s: float
    busy_s: float
    bubble_s: float
    compute_s: float
    launch_s: float
    gradients_s: float
    optimizer_s: float
    communicators: Mapping[str, CommTimes]
    memory: StageMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCarveOut:
    """The same iteration with another carve-out, everything else as it is."""

    sm_carveout: int
    iteration_s: float


@dataclass(frozen=True, kw_only=True)
class Simulated(Drawn):
    """What both forms hold besides their JSON: `simulated`, found again as `timeline`."""

    simulated: InitVar[Timeline]

    def __post_init__(self, simulated: Timeline) -> None:
        object.__setattr__(self, "_timeline", simulated)

    @property
    def timeline(self) -> Timeline:
        """What ran when: one rank per pipeline stage, or the captured rank."""
        timeline: Timeline = self.behind("_timeline", "timeline that can be read (timeline.json)")
        return timeline


@dataclass(frozen=True, kw_only=True)
class SimulateResult(Simulated):
    """One simulated iteration; `bubble_s` and `communicators` are of the stage that ends last.

    `carve_outs` are those that the job names to try; `what_ifs` are changes that it does not make, best first.
    """

    verb: ClassVar[str] = "simulate"

    tool: str = "lagom simulate"
    job: str
    model: str
    cluster: str
    num_gpus: int
    num_micro_batches: int
    iteration_s: float
    tokens_per_s: float
    model_flops: float
    mfu: float
    peak_flops_per_gpu: float
    memory_bytes: int
    memory_limit_bytes: int
    bubble_s: float
    communicators: Mapping[str, CommTimes]
    stages: tuple[SimulatedStage, ...]
    carve_outs: tuple[SimulatedCarveOut, ...] = ()
    what_ifs: tuple[WhatIf, ...] = ()
    notes: tuple[str, ...]
    files: tuple[Path, ...]

    def table(self) -> list[Row]:
        """One row per pipeline stage."""
        return [
            {
                "stage": stage.stage,
                "busy_s": stage.busy_s,
                "bubble_s": stage.bubble_s,
                "compute_s": stage.compute_s,
                "launch_s": stage.launch_s,
                "exposed_comm_s": sum(comm.exposed_s for comm in stage.communicators.values()),
                "stretched_s": sum(comm.stretched_s for comm in stage.communicators.values()),
                "gradients_s": stage.gradients_s,
                "optimizer_s": stage.optimizer_s,
                "memory_bytes": stage.memory.total_bytes,
            }
            for stage in self.stages
        ]


@dataclass(frozen=True, kw_only=True)
class SimulateCaptureResult(Simulated):
    """One simulated step of a captured rank; `peak_memory_bytes` holds resident memory and live buffers.

    `what_ifs` are changes to its collectives, best first.
    """

    verb: ClassVar[str] = "simulate_capture"

    tool: str = "lagom simulate"
    job: str
    capture: str
    cluster: str
    num_ranks: int
    num_ops: int
    num_comms: int
    iteration_s: float
    compute_s: float
    comm_s: float
    exposed_comm_s: float
    peak_memory_bytes: int
    memory_limit_bytes: int
    what_ifs: tuple[WhatIf, ...] = ()
    notes: tuple[str, ...]
    files: tuple[Path, ...]

    def headline(self) -> tuple[str, str]:
        """The step, and what it is spent on and holds."""
        memory = f"{format_memory(self.peak_memory_bytes)} of {format_memory(self.memory_limit_bytes)}"
        return (
            f"{self.capture} on {self.num_ranks} GPUs ({self.cluster}): {format_seconds(self.iteration_s)}",
            f"compute {format_seconds(self.compute_s)}, communication {format_seconds(self.comm_s)}, "
            f"exposed {format_seconds(self.exposed_comm_s)}; memory {memory}",
        )

    def summary(self) -> str:
        """What the step takes, what is exposed, what it holds, whether a change would pay, and the caveats."""
        step, parts = self.headline()
        lines = [step, f"  {parts}", *filter(None, (whether(self.what_ifs),)), *self.notes]
        return "\n".join([*lines, *(f"Written: {path}" for path in self.files)])

    def table(self) -> list[Row]:
        """One row per operator as it ran."""
        return [
            {
                "operator": span.name,
                "kind": span.kind.value,
                "stream": span.stream,
                "start_s": span.start_s,
                "end_s": span.end_s,
            }
            for span in self.timeline.spans
        ]
