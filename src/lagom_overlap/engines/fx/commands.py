"""What a controller asks of ranks about a program, and what rank 0 answers. Needs no torch."""

import msgspec

from lagom_overlap.timeline import Span
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.rewrite.tables import RewriteTable


class ScriptProgram(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training step as code: a function of a Python file that returns (step, inputs)."""

    script: str
    function: str


class ProfileProgram(msgspec.Struct, frozen=True, tag="profile_program", forbid_unknown_fields=True):
    """Time each operator alone, `repeats` times; with `side_by_side` collectives next to computations, too."""

    program: ScriptProgram
    repeats: int
    side_by_side: bool = False


class RunPlan(msgspec.Struct, frozen=True, tag="run_plan", forbid_unknown_fields=True):
    """Run the program and the program under the rewrites, `rounds` times each, in shuffled order within a round.

    `graph` is the digest of the graph that the plan was made for.
    """

    program: ScriptProgram
    rewrites: tuple[RewriteTable, ...]
    rounds: int
    seed: int
    graph: str


class TraceSteps(msgspec.Struct, frozen=True, tag="trace_steps", forbid_unknown_fields=True):
    """Train so many steps of a program's `TrainingStep` under PyTorch's profiler; rank 0 writes its trace to `path`."""

    program: ScriptProgram
    num_steps: int
    path: str


class RunSettings(msgspec.Struct, frozen=True, tag="run_settings", forbid_unknown_fields=True):
    """Train a program's `TrainingStep` as FSDP2 runs it and with the settings, `rounds` steps each, side by side."""

    program: ScriptProgram
    settings: Fsdp2Settings
    rounds: int
    seed: int


class Traced(msgspec.Struct, frozen=True, tag="traced", forbid_unknown_fields=True):
    """The trace is written."""


class Profiled(msgspec.Struct, frozen=True, tag="profiled", forbid_unknown_fields=True):
    """Mean seconds of each operator, of the slowest rank.

    `rates` are the progress of a collective and of computations while both run, relative to running alone.
    """

    seconds: dict[str, float]
    rates: dict[str, float] = {}


class ArmRuns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rounds of one arm, each the maximum over ranks (s), and rank 0's spans of the last one.

    Of a framework's step only the length of a round is known.
    """

    makespan_s: tuple[float, ...]
    exposed_s: tuple[float, ...] = ()
    spans: tuple[Span, ...] = ()


class PlanRun(msgspec.Struct, frozen=True, tag="plan_run", forbid_unknown_fields=True):
    """The program as it is (`before`) and as planned (`after`).

    `max_error` is the largest difference of an output relative to the largest value in it, on any rank; of a training
    step, of a loss, or of a parameter at the end (or a gradient that no optimizer clears; with `reduce_in_param_dtype`
    losses alone).
    """

    before: ArmRuns
    after: ArmRuns
    max_error: float
    order_digest: str


class Refused(msgspec.Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """Nothing was run, and why: a user's mistake."""

    reason: str
