"""What `lagom plan` prints with --json and draws: typed, stable, in SI units. Format: docs/formats_plan.md."""

import msgspec


class IterationTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted makespans (s): as the framework issues it, as planned, and a bound of the unsplit graph's schedules."""

    before: float
    after: float
    lower_bound: float


class BeforeAfter(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity before and after the plan."""

    before: float
    after: float


class PeakMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Most bytes held, and the most that are allowed (null: no limit)."""

    before: int
    after: int
    limit: int | None


class GroupsJson(msgspec.Struct, frozen=True, kw_only=True):
    """A mesh over the group, and its axes in the order in which they run."""

    mesh: list[int]
    order: list[int]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan does with one collective of the program, or that it cuts a computation alone (`is_computation`).

    `split_dim` is the dimension of its result along which it is cut into `num_chunks`; None for a computation whose
    pieces are summed. `prefetch` counts computations that are issued between it and the first that needs it.
    """

    comm: str
    substitution: str | None = None
    groups: GroupsJson | None = None
    split_dim: int | None = None
    num_chunks: int = 1
    fused_with: list[str] = []
    prefetch: int = 0
    is_computation: bool | msgspec.UnsetType = msgspec.UNSET


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Median and quartiles."""

    median: float
    q25: float
    q75: float


class ExecutionJson(msgspec.Struct, frozen=True, kw_only=True):
    """The plan run against the program on real ranks, in interleaved rounds; times are the slowest rank's (s).

    `max_error` is the largest difference of an output relative to the largest value of that output on any rank; 0 is
    equal bit for bit. `speedup` is the ratio of the two in the same round.
    """

    backend: str
    num_ranks: int
    rounds: int
    max_error: float
    is_bitwise_equal: bool
    order_digest: str
    iteration_s: dict[str, Spread]
    exposed_comm_s: dict[str, Spread]
    predicted_iteration_s: BeforeAfter
    predicted_exposed_comm_s: BeforeAfter
    speedup: Spread


class HeldTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How many operators there are, for how many a time was measured, and those's share of all their time."""

    num: int
    num_measured: int
    share_of_time: float


class TimesJson(msgspec.Struct, frozen=True, kw_only=True):
    """Where the times come from: `source` is "trace" or "ranks".

    Of a trace: its file, its steps (0: it marks none), and whether times are those of GPU kernels; `num_in_order` were
    matched in the order of the step, the rest of those measured by shape. `scale` is, per sort of operator, the factor
    on the model's time of what was not measured. `num_pieces` are the shapes of pieces that were measured too.
    """

    source: str
    computations: HeldTimes
    collectives: HeldTimes
    file: str | None = None
    num_steps: int = 0
    is_gpu: bool = False
    num_in_order: int = 0
    scale: dict[str, float] = {}
    num_pieces: int = 0


class SwitchJson(msgspec.Struct, frozen=True, kw_only=True):
    """One of Megatron-LM's switches: seconds without it and with it, all else equal."""

    switch: str
    without_s: float
    with_s: float


class PipelineJson(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline: a stage's forward, backward and transfer (s), and what they mean.

    `transfer_share` is what transfers add to the pipeline's time, `bubble` its idle over its busy time.
    """

    forward_s: float
    backward_s: float
    transfer_s: float
    transfer_share: float
    bubble: float
    num_micro_batches: int
    wanted_micro_batches: int
    switches: list[SwitchJson]


class MegatronJson(msgspec.Struct, frozen=True, kw_only=True):
    """Megatron-LM's switches as recommended for a scale, and what each is predicted to bring on this step."""

    scale: str
    num_gpus: int
    is_contended: bool
    arguments: list[str]
    step_s: float
    without_overlap_s: float
    switches: list[SwitchJson]
    pipeline: PipelineJson | None


class PlanJson(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `lagom plan`."""

    planner: str
    num_ops: int
    num_comms: int
    iteration_s: IterationTimes
    exposed_comm_s: BeforeAfter
    peak_memory_bytes: PeakMemory
    decisions: list[Decision]
    solve_s: float
    files: list[str]
    times: TimesJson | msgspec.UnsetType = msgspec.UNSET
    execution: ExecutionJson | msgspec.UnsetType = msgspec.UNSET
    megatron: MegatronJson | msgspec.UnsetType = msgspec.UNSET


class PlannerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One planner of `lagom compare --planners`: predicted seconds, bytes, and the seconds that it took.

    Where it found no plan, `failure` says why and what a plan would have is None.
    """

    planner: str
    before_s: float
    after_s: float | None = None
    lower_bound_s: float | None = None
    exposed_comm_s: float | None = None
    peak_memory_bytes: int | None = None
    solve_s: float | None = None
    failure: str | None = None
