"""The job file: TOML checked key by key. A job file is data; nothing in it is run.

`read_job` gives a `JobSpec` or raises a `JobError` of one line that names the key, the value and what is allowed. The
format is described in docs/formats.md.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_type_hints

import msgspec
from msgspec import Meta

from lagom_overlap.collective import Algorithm, CollectiveKind, LaunchOrder, Protocol, StreamPriority, Transport
from lagom_overlap.errors import JobError, MissingDependencyError, UnknownNameError, allowed_names, in_words
from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.record import read_regular, starts_with
from lagom_overlap.registry import BACKENDS, PLANNERS, TUNERS, checked_options, entry_point_names, load
from lagom_overlap.toml_tables import Count, Name, Size, parse_toml, size_bytes, types_in
from lagom_overlap.tuners.registry import OURS
from lagom_overlap.units import GBIT_PER_S
from lagom_overlap.workload.parallel import ParallelTable
from lagom_overlap.workload.precision import ATTENTION_FORMATS, DType, ProductFormat

MAX_JOB_BYTES: Final = 1 << 20
"""A job file above 1 MiB is refused: it is not one that a person wrote."""

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


def read_job(path: Path, *, may_lack_work: bool = False) -> JobSpec:
    """The job file at `path`. With `may_lack_work` it need not say what it trains: a command or a trace does.

    Raises:
        JobError: if it is missing, unreadable, oversized, no TOML, or holds what is not allowed.
    """
    return seen_from(parse_job(read_tables(path), str(path), may_lack_work=may_lack_work), path.parent)


def read_tables(path: Path) -> dict[str, Any]:  # any TOML value
    """The tables of the job file at `path`, unchecked.

    Raises:
        JobError: if it is missing, unreadable, oversized or no TOML.
    """
    _refuse_other_kinds(path)
    try:
        content = read_regular(path, MAX_JOB_BYTES)
    except FileNotFoundError:
        raise JobError(f"job file {str(path)!r} does not exist") from None
    except OSError as error:
        raise JobError(f"job file {str(path)!r} cannot be read: {error.strerror}") from None
    try:
        return parse_toml(content)
    except UnicodeDecodeError as error:
        raise JobError(f"job file {str(path)!r} is not UTF-8 text (byte {error.start})") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise JobError(f"job file {str(path)!r} is not TOML: {error}") from None


_OTHERS: Final = (b"\x1f\x8b", b"{", b"SQLite format 3")
"""How gzip, JSON and Nsight's exports begin; no TOML does."""


def _refuse_other_kinds(path: Path) -> None:
    """Refuses what is for another verb, and names that verb.

    Raises:
        JobError: if it is a folder, a trace or a capture.
    """
    if path.is_dir():
        raise JobError(f"{str(path)!r} is a folder, no job file; if it holds traces: lagom analyze {path}")
    if not starts_with(path, *_OTHERS):
        return
    from lagom_overlap.trace.reader import is_trace  # noqa: PLC0415 - decoders of traces, for a mistake

    if is_trace(path):
        raise JobError(
            f"{str(path)!r} is a profiler's trace, no job file: lagom analyze {path} says what overlaps in it, "
            f"lagom tune --from-trace {path} what tuning would gain"
        )
    raise JobError(
        f"{str(path)!r} is no job file; if it is a capture, a job file names it: [job] name, [model] capture = "
        f"{str(path)!r}, [cluster] preset (lagom plan takes one without, with --cluster)"
    )


_FILES: Final[Mapping[tuple[str, str], Callable[[str], bool]]] = {
    ("cluster", "preset"): lambda name: name.endswith(".toml"),
    ("cluster", "gpu"): lambda name: name.endswith(".toml"),
    ("model", "name"): lambda name: name.endswith(".toml"),
    ("model", "capture"): lambda _: True,
    ("tune", "warm_start"): lambda _: True,
    ("plan", "times"): lambda name: name not in list(TimesSource),
    ("program", "script"): lambda _: True,
}
"""Keys that name a file, as seen from the job file's folder, and whether a value is one and no preset or word."""


def seen_from(spec: JobSpec, folder: Path) -> JobSpec:
    """The job, its paths as seen from where we are, not from the job file's folder."""
    for (table, key), is_file in _FILES.items():
        part = getattr(spec, table)
        name = None if part is None else getattr(part, key)
        if name is None or not is_file(name):
            continue
        seen = str(folder / name)
        if not is_file(seen):  # a Path drops the ./ of ./measure, which is no word
            seen = os.path.join(folder, name)  # noqa: PTH118
        spec = msgspec.structs.replace(spec, **{table: msgspec.structs.replace(part, **{key: seen})})
    return spec


def moved(tables: Mapping[str, Any], source: Path, target: Path) -> dict[str, Any]:
    """The tables of a job file in folder `source` for one in folder `target`: relative paths name the same files."""
    own = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    for (table, key), is_file in _FILES.items():
        part = own.get(table)
        name = part.get(key) if isinstance(part, dict) else None
        if isinstance(part, dict) and isinstance(name, str) and is_file(name) and not Path(name).is_absolute():
            part[key] = os.path.relpath(source / name, target)
            if not is_file(part[key]):
                part[key] = os.path.join(os.curdir, part[key])  # noqa: PTH118
    return own


def parse_job(raw: dict[str, Any], where: str, *, may_lack_work: bool = False) -> JobSpec:
    """A decoded TOML document as a `JobSpec`.

    Raises:
        JobError: naming the key, its value and what is allowed.
        UnknownNameError: if there is no tuner, planner or backend that it names.
    """
    try:
        spec = msgspec.convert(raw, JobSpec)
    except msgspec.ValidationError as error:
        raise JobError(f"{where}: {_explain(str(error), raw)}") from None
    for key in raw.get("parallel", {}):  # decoded to a dataclass, of which msgspec lets unknown keys pass
        if key not in _keys_of(ParallelTable):
            raise JobError(f"{where}: {_unknown('parallel.', key, ParallelTable)}")
    _check_together(spec, where, may_lack_work=may_lack_work)
    _check_named(spec)
    for key, size in _sizes(spec):
        size_bytes(size, f"{where}: {key}")
    return spec


def _sizes(spec: JobSpec) -> Iterator[tuple[str, str | int]]:
    """Sizes that a file may write with a unit, each with its key: a wrong one is refused whichever verb reads it."""
    if spec.plan.memory_limit is not None:
        yield "plan.memory_limit", spec.plan.memory_limit
    if spec.parallel is not None and spec.parallel.bucket_bytes is not None:
        yield "parallel.bucket_bytes", spec.parallel.bucket_bytes
    for key in ("chunk_bytes", "slice_bytes"):
        yield from ((f"tune.space.{key}", size) for size in getattr(spec.tune.space, key) or ())


def _check_named(spec: JobSpec) -> None:
    """Refuses names that nothing is registered under, and options that what they name has not, whoever reads them.

    Raises:
        UnknownNameError: naming what there is.
        JobError: for an option.
    """
    named: tuple[tuple[str, str, str | None, Mapping[str, object], str], ...] = (
        (TUNERS, "tuner", spec.tune.tuner, spec.tune.options, "tune"),
        (PLANNERS, "planner", spec.plan.planner, spec.plan.options, "plan"),
        (BACKENDS, "backend", spec.job.backend, {}, "job"),
    )
    for group, what, name, options, table in named:
        if name is not None and name not in (known := entry_point_names(group)):
            raise UnknownNameError.among(what, name, known)
        if name is not None and options:
            with suppress(MissingDependencyError):  # told by the verb that needs it
                checked_options(load(group, what, name), name, options, what=what, table=table)


def _check_together(spec: JobSpec, where: str, *, may_lack_work: bool) -> None:
    num_kinds = (spec.model is not None) + bool(spec.group) + (spec.program is not None)
    if num_kinds != 1 and not (may_lack_work and num_kinds == 0):
        raise JobError(
            f"{where}: give either [model] with [parallel] and [cluster], or at least one [[group]], or [program]"
        )
    if spec.model is not None and spec.model.capture is not None:
        _check_captured(spec, spec.model, where)
    elif spec.model is not None:
        missing_keys = [key for key in ("name", "seq_len") if getattr(spec.model, key) is None]
        if missing_keys:
            raise JobError(f"{where}: missing key 'model.{missing_keys[0]}'")
    if spec.model is not None and spec.model.capture is None and (spec.parallel is None or spec.cluster is None):
        missing = "[parallel]" if spec.parallel is None else "[cluster]"
        raise JobError(f"{where}: [model] needs {missing} too")
    if spec.model is None and spec.parallel is not None:
        raise JobError(f"{where}: [parallel] has no meaning without [model]")
    if spec.parallel is not None:
        _check_parallel(spec.parallel, where)
    link_bytes_per_s(spec.job.link)
    _check_groups(spec, where)
    space = spec.tune.space
    for key in _keys_of(SpaceTable):
        if getattr(space, key) == []:
            raise JobError(f"{where}: tune.space.{key} is [], must name at least one value")
    if space.chunk_bytes is not None and space.slice_bytes is not None:
        raise JobError(f"{where}: tune.space: give chunk_bytes or slice_bytes, not both")


def _check_groups(spec: JobSpec, where: str) -> None:
    for index, group in enumerate(spec.group):
        place = f"{where}: group[{index}]"
        if (group.block is None) == (not group.op):
            raise JobError(f"{place} {group.name!r}: give either block or op, one of the two")
        if group.block is not None and group.block.hidden % group.block.heads:
            raise JobError(f"{place}.block: hidden {group.block.hidden} is not a multiple of heads {group.block.heads}")
        for number, op in enumerate(group.op):
            if sum(work is not None for work in (op.gemm, op.attention, op.memory)) != 1:
                raise JobError(f"{place}.op[{number}] {op.name!r}: give exactly one of gemm, attention, memory")


def _check_captured(spec: JobSpec, model: ModelTable, where: str) -> None:
    for key in ("name", "seq_len", "mtp_layers"):
        if getattr(model, key) is not None:
            raise JobError(f"{where}: model.capture already says model.{key}: give one of the two")
    if spec.parallel is not None:
        raise JobError(f"{where}: [parallel] has no meaning with model.capture: the captured step is parallel already")
    if spec.cluster is None:
        raise JobError(f"{where}: [model] needs [cluster] too")


def _check_parallel(parallel: ParallelTable, where: str) -> None:
    if parallel.auto is not None:
        kept = {"auto", "micro_batch", "global_batch"}
        for field in fields(parallel):
            if field.name not in kept and getattr(parallel, field.name) != field.default:
                raise JobError(
                    f"{where}: parallel.auto searches for the sharding: parallel.{field.name} has no meaning with it"
                )
    if parallel.fsdp is None:
        return
    if parallel.data is not None:
        raise JobError(f"{where}: parallel.fsdp already says parallel.data: give one of the two")
    if parallel.zero_stage not in (None, 2, 3):
        raise JobError(
            f"{where}: parallel.zero_stage is {parallel.zero_stage}: with parallel.fsdp, which shards parameters, "
            "must be 3 or 2 (parameters kept after forward)"
        )


_PATH: Final = re.compile(r" - at `\$?(.*)`$")
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(.*)`$")
_MISSING: Final = re.compile(r"^Object missing required field `(.*)`$")


def _lookup(raw: Any, path: str) -> Any:  # any TOML value
    for part in re.findall(r"\[(\d+)\]|\.([^.\[]+)", path):
        raw = raw[int(part[0])] if part[0] else raw[part[1]]
    return raw


def _keys_of(table: type) -> dict[str, Any]:  # annotations
    """The keys of a table as a file spells them, with their types."""
    hints = get_type_hints(table)
    if is_dataclass(table):
        return hints
    assert issubclass(table, Spec), table
    return {key: hints[name] for key, name in zip(table.__struct_encode_fields__, table.__struct_fields__, strict=True)}


def _types_at(path: str) -> list[type]:
    """What the value may be that a path such as `.group[0].comm[1]` leads to."""
    types: list[type] = [JobSpec]
    for name in re.findall(r"\.([^.\[]+)", path):
        table = _table_in(types)
        types = types_in(_keys_of(table).get(name)) if table else []
    return types


def _table_in(types: list[type]) -> type | None:
    return next((one for one in types if is_dataclass(one) or issubclass(one, Spec)), None)


def _unknown(place: str, key: str, table: type) -> str:
    allowed = sorted(_keys_of(table))
    return f"unknown key {place + key!r}{allowed_names(key, allowed)}"


def _explain(message: str, raw: dict[str, Any]) -> str:
    """One line for a msgspec complaint: the key, the value, what is allowed."""
    place = _PATH.search(message)
    path = place[1] if place else ""
    complaint = message[: place.start()] if place else message
    key = path.lstrip(".")
    if unknown := _UNKNOWN.match(complaint):
        table = _table_in(_types_at(path))
        assert table is not None, path
        return _unknown(f"{key}.".lstrip("."), unknown[1], table)
    if missing := _MISSING.match(complaint):
        return f"missing key {f'{key}.{missing[1]}'.lstrip('.')!r}"
    try:
        value = repr(_lookup(raw, path))
    except (KeyError, IndexError, TypeError):
        value = "?"
    words = in_words(complaint)
    return f"{key} is {value[:80]}{',' if words.startswith('must') else ':'} {words}" + _enum_hint(path)


def _enum_hint(path: str) -> str:
    if path in (".precision.attention", ".precision.head"):
        return f"; allowed: {', '.join(ATTENTION_FORMATS)}"
    enum = next((one for one in _types_at(path) if issubclass(one, StrEnum)), None)
    return "" if enum is None else f"; allowed: {', '.join(enum)}"
