"""The tables of a job file, as frozen structs. Their format is described in docs/formats.md."""

import re
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lagom_overlap.collective import Algorithm, CollectiveKind, LaunchOrder, Protocol, StreamPriority, Transport
from lagom_overlap.errors import JobError
from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.toml_tables import Count, Name, Size
from lagom_overlap.tuners.registry import OURS
from lagom_overlap.units import GBIT_PER_S
from lagom_overlap.workload.parallel import ParallelTable
from lagom_overlap.workload.precision import DType, ProductFormat

NumSms = Annotated[int, Meta(ge=0, le=4096)]


class Spec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the job file: unknown keys are errors."""


class JobTable(Spec, frozen=True):
    """`[job]`: the name, the backend, and for `backend = "gloo"` the ranks and the link."""

    name: Name
    backend: Name = "simulated"
    ranks: Annotated[int, Meta(ge=2, le=64)] = 2
    link: str = "loopback"
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0


class ModelTable(Spec, frozen=True):
    """`[model]`: a named model, or a file of one (`*.toml`), or a captured step (`capture`, seen from the job file).

    `mtp_layers` is how many multi-token predictions are trained, where not as many as the model has.
    """

    name: Name | None = None
    seq_len: Count | None = None
    mtp_layers: Annotated[int, Meta(ge=0, le=16)] | None = None
    capture: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None


class ClusterTable(Spec, frozen=True):
    """`[cluster]`: a preset by name or a file of one (`*.toml`), with other nodes if given.

    `gpu` is a GPU by name or a file of one (`*.toml`) that the nodes have in place of the preset's.
    """

    preset: Name
    gpu: Name | None = None
    nodes: Count | None = None
    gpus_per_node: Count | None = None


class PrecisionTable(Spec, frozen=True):
    """`[precision]`: number formats of what is gathered and multiplied, of gradients, of what is reduced.

    What is left out is the framework's default (`workload.step.rules`).
    """

    parameter: DType | None = None
    gradient: DType | None = None
    reduction: DType | None = None
    products: ProductFormat = ProductFormat.PARAMETER
    attention: ProductFormat = ProductFormat.PARAMETER
    head: ProductFormat = ProductFormat.PARAMETER


class CostTable(Spec, frozen=True):
    """`[cost]`: the simulator's profile, and the sigma of the log-normal factor on every simulated time.

    With `sm_carveout` matrix products are persistent kernels that leave that many SMs free; without it plain ones.
    `rank_skew_s` is how much later the last rank reaches every collective: its channels hold their SMs for that too.
    """

    profile: Name = "plausible"
    noise: Annotated[float, Meta(ge=0, le=1)] = 0.0
    sm_carveout: NumSms | None = None
    rank_skew_s: Annotated[float, Meta(ge=0, le=10)] = 0.0


class BlockTable(Spec, frozen=True):
    """`[group.block]`: a transformer block by its shapes, repeated `repeat` times."""

    seq_len: Count
    hidden: Count
    heads: Count
    ffn: Count
    batch: Count = 1
    repeat: Annotated[int, Meta(ge=1, le=10_000)] = 1


class OpTable(Spec, frozen=True):
    """`[[group.op]]`: one computation; exactly one of gemm = [m, n, k], attention, memory."""

    name: Name
    gemm: Annotated[list[Count], Meta(min_length=3, max_length=3)] | None = None
    attention: Annotated[list[Count], Meta(min_length=4, max_length=4)] | None = None
    memory: Size | None = None


class CommTable(Spec, frozen=True):
    """`[[group.comm]]`: one collective; `starts_after` holds it back until that many computations are done."""

    name: Name
    kind: CollectiveKind
    bytes: Size
    communicator: Name = "default"
    starts_after: Annotated[int, Meta(ge=0)] = 0


class GroupTable(Spec, frozen=True):
    """`[[group]]`: computations (`block` or `op`) and the collectives (`comm`) that overlap them."""

    name: Name
    comm: Annotated[list[CommTable], Meta(min_length=1, max_length=64)]
    block: BlockTable | None = None
    op: Annotated[list[OpTable], Meta(max_length=60_000)] = []
    count: Count = 1


class SpaceTable(Spec, frozen=True):
    """`[tune] space`: allowed values per knob; a knob that is absent keeps the engine's own values.

    `chunk_bytes` are chunks on the wire; `slice_bytes` are the papers' C and are converted; give one of the two.
    `sm_carveout`, `launch_order` and `stream_priority` are of the computation's side, which the tuner `both_sides`
    searches besides the collectives; absent ones are left alone.
    """

    algorithm: list[Algorithm] | None = None
    protocol: list[Protocol] | None = None
    transport: list[Transport] | None = None
    num_channels: list[Count] | None = None
    num_threads: list[Count] | None = None
    chunk_bytes: list[Size] | None = None
    slice_bytes: list[Size] | None = None
    sm_carveout: list[NumSms] | None = None
    launch_order: list[LaunchOrder] | None = None
    stream_priority: list[StreamPriority] | None = None

    @property
    def launch_keys(self) -> tuple[str, ...]:
        """The keys of the computation's side that are given."""
        keys = ("sm_carveout", "launch_order", "stream_priority")
        return tuple(key for key in keys if getattr(self, key) is not None)


class BudgetTable(Spec, frozen=True):
    """`[tune] budget`: the search ends at whichever comes first; the verdict's pairs are not counted.

    `measurements` None: what the tuner needs to end by itself, if it says so, else 40.
    """

    measurements: Count | None = None
    seconds: Annotated[float, Meta(gt=0, le=10_000_000)] = 300.0


class TuneTable(Spec, frozen=True):
    """`[tune]`: the tuner and its options, the space, the budget, the verdict.

    `warm_start` is the run folder where the search may begin, seen from the job file.
    """

    tuner: Name = OURS
    guard: bool = True
    options: dict[str, bool | int | float | str] = {}
    warm_start: Name | None = None
    space: SpaceTable = SpaceTable()
    budget: BudgetTable = BudgetTable()
    pairs: Annotated[int, Meta(ge=3, le=101)] = 25
    repeats: Annotated[int, Meta(ge=1, le=101)] = 1
    seed: Annotated[int, Meta(ge=0, le=1 << 62)] = 0


class ProgramTable(Spec, frozen=True):
    """`[program]`: a training step as code, for `lagom plan`: a function of a Python file, seen from the job file.

    `nodes` is how many nodes the plan takes the gloo ranks to be spread over, in order: it decides which links a
    collective uses.
    """

    script: Name
    function: Name = "step"
    nodes: Annotated[int, Meta(ge=1, le=64)] = 1


class TimesSource(StrEnum):
    """Words of `plan.times` and `--times`; anything else is a trace's file."""

    MODEL = "model"
    MEASURE = "measure"


class PlanTable(Spec, frozen=True):
    """`[plan]`: the planner and its options, who runs the plan, what bounds it, and how often it is executed.

    Without `planner` it is the carrier's (key `for`), and without that the carrier is the job's framework.
    `prefetch` is how many gathered parameter groups may be held (0: no limit), `exact` forbids what changes the order
    of a reduction, `rounds` are those of `--execute`. `budget_s` is the clock's (10 s where neither is given), `work`
    millions of steps, which find the same plan on any machine; with both, whichever is over first. `times`
    is "model", "measure" or one rank's trace, seen from the job file; without it, the model's, or measured where there
    are ranks.
    """

    planner: Name | None = None
    carrier: Carrier | None = msgspec.field(default=None, name="for")
    times: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    memory_limit: Size | None = None
    prefetch: Annotated[int, Meta(ge=0, le=1_000_000)] = 3
    exact: bool = False
    budget_s: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None
    work: Annotated[float, Meta(gt=0, le=1_000_000_000)] | None = None
    options: dict[str, bool | int | float | str] = {}
    seed: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    rounds: Annotated[int, Meta(ge=3, le=101)] = 11


class RankFactor(Spec, frozen=True):
    """A rank that is slower than its price by a factor."""

    rank: Annotated[int, Meta(ge=0, le=1 << 20)]
    factor: Annotated[float, Meta(ge=1, le=1000)]


class RankDelay(Spec, frozen=True):
    """A rank that begins later."""

    rank: Annotated[int, Meta(ge=0, le=1 << 20)]
    seconds: Annotated[float, Meta(ge=0, le=86_400)]


class EmulateTable(Spec, frozen=True):
    """`[emulate]`, for `lagom emulate`: what a launch costs the host, and what disturbs the job.

    `noise` is the sigma of a log-normal factor on every operation; stragglers stretch a rank's kernels, slow links the
    collectives that it takes part in. A job in which nobody moves for `stall_s` of real time is ended.
    """

    launch_s: Annotated[float, Meta(ge=0, le=1)] = 5e-6
    noise: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=1 << 62)] = 0
    stragglers: list[RankFactor] = []
    slow_links: list[RankFactor] = []
    skew: list[RankDelay] = []
    python_clock: Literal["real", "virtual"] = "real"
    stall_s: Annotated[float, Meta(gt=0, le=86_400)] = 60.0


class JobSpec(Spec, frozen=True):
    """A whole job file."""

    job: JobTable
    model: ModelTable | None = None
    cluster: ClusterTable | None = None
    parallel: ParallelTable | None = None
    precision: PrecisionTable = PrecisionTable()
    cost: CostTable = CostTable()
    group: list[GroupTable] = []
    tune: TuneTable = TuneTable()
    program: ProgramTable | None = None
    plan: PlanTable = PlanTable()
    emulate: EmulateTable | None = None


def link_bytes_per_s(text: str, where: str = "job.link") -> float | None:
    """`"loopback"` -> None; `"3 Gbit/s"` -> bytes per second of an emulated link, one direction.

    Raises:
        JobError: if it is neither; `where` names the key or the flag that said so.
    """
    if text == "loopback":
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*Gbit/s\s*", text)
    if match is None or float(match[1]) <= 0:
        raise JobError(f'{where}: {text!r} is not a link; allowed: "loopback", or an emulated rate such as "3 Gbit/s"')
    return float(match[1]) * GBIT_PER_S
