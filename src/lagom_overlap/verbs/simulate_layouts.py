"""`lagom simulate --model NAME --gpus N`: every layout of a model on a cluster, the fastest first; variants of a job.

A layout is judged by what `lagom simulate` says of the job file with its keys: the same step, the same memory.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import isfinite, prod
from pathlib import Path
from typing import Any, Final

import msgspec

from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.hardware import Cluster
from lagom_overlap.interrupts import noted
from lagom_overlap.jobfile.memory import check_memory
from lagom_overlap.jobfile.reading import moved, parse_job, seen_from
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.jobfile.spec import ClusterTable, JobSpec
from lagom_overlap.jobfile.step import SEQ_LEN, JobStep, cluster_of, job_step, stated_cluster
from lagom_overlap.jobfile.variants import JobVariants, Values, job_toml
from lagom_overlap.planners.layout_search import LayoutSearch, Outcome, SearchProgress
from lagom_overlap.planners.layout_space import MICRO_BATCHES, NOT_TRIED, Keys, LayoutSpace
from lagom_overlap.results.layouts import BEST_FILE, LayoutRow, LayoutsResult, RefusedVariant
from lagom_overlap.units import format_memory, format_seconds
from lagom_overlap.verbs.simulate_what_if import spent
from lagom_overlap.workload.models import TransformerModel, load_model
from lagom_overlap.workload.parallel import ParallelTable
from lagom_overlap.workload.parallel.layout_check import check_layout
from lagom_overlap.workload.step import load_rules

FRAMEWORKS: Final = ("megatron", "fsdp2")
"""What a job file means without `framework`: degrees of Megatron-LM's, or FSDP."""
SEQUENCES_PER_GPU: Final = 2
"""Where no global batch is given: NVIDIA's recipe of Llama 3 70B on 64 H100s has 128 (Megatron-Bridge, performance)."""
KEPT: Final = 10
"""Layouts that the ranking is certain of, if it ends by itself."""
MOST_SIMULATED: Final = 200
"""About 20 s of CPU time for a model of 80 layers; rankings of small models end long before."""
MOST_DOUBLINGS: Final = 7
"""Of the GPUs of a job that fits no layout: 128 times as many."""
_FILES: Final = ("run.json", "report.html", BEST_FILE)

OnProgress = Callable[[SearchProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutsRequest:
    """A model on `num_gpus` GPUs of a cluster; `global_batch` in sequences, by default two per GPU."""

    model: str
    cluster: str
    num_gpus: int
    seq_len: int = SEQ_LEN
    global_batch: int | None = None
    frameworks: Sequence[str] = FRAMEWORKS
    out: Path | None = None

    @property
    def name(self) -> str:
        """What the job is called."""
        model, cluster = (Path(name).name.removesuffix(".toml") for name in (self.model, self.cluster))
        return f"{model}-{cluster}-{self.num_gpus}"

    @property
    def batch(self) -> int:
        """Sequences of a global batch."""
        return self.global_batch or SEQUENCES_PER_GPU * self.num_gpus

    def tables(self, keys: Keys) -> dict[str, Any]:
        """The job file of a layout."""
        return {
            "job": {"name": self.name},
            "model": {"name": self.model, "seq_len": self.seq_len},
            "cluster": {"preset": self.cluster},
            "parallel": {key: list(value) if isinstance(value, tuple) else value for key, value in keys.items()},
        }

    def spec(self, keys: Keys) -> JobSpec:
        """The job of a layout.

        Raises:
            JobError: if it holds what is not allowed.
        """
        return seen_from(parse_job(self.tables(keys), self.name), Path())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """A candidate: its keys, the job, its features and its bound."""

    keys: Keys
    step: JobStep
    family: tuple[Hashable, ...]
    micro_batch: int
    bound_s: float

    @property
    def features(self) -> tuple[Hashable, ...]:
        """What an iteration takes more than its computations depends on."""
        return (*self.family, self.micro_batch)


def run_layouts(request: LayoutsRequest, on_progress: OnProgress = lambda _: None) -> LayoutsResult:
    """Ranks a model's layouts and writes the run folder, with the fastest as a job file.

    Raises:
        LagomError: if there is no such model, cluster or framework, or no layout fits.
    """
    RunFolder.check(request.out)
    model, cluster = load_model(request.model), _cluster(request)
    layouts, num_too_large, notes = _candidates(request, model, cluster)
    simulated = _Simulated()
    search = LayoutSearch(layouts, simulated, KEPT, MOST_SIMULATED, num_too_large=num_too_large)
    interrupted = _followed(search.run(), on_progress)
    if not search.times:
        if interrupted:
            raise KeyboardInterrupt
        raise JobError(
            f"no layout of {model.name} fits {request.num_gpus} GPUs of {format_memory(cluster.gpu.memory_bytes)} "
            f"({cluster.name}): {search.num_too_large} layouts were counted; use more GPUs, or a shorter --seq-len"
            + "".join(f" ({note.rstrip('.')})" for note in notes)
        )
    rows = _ranked(simulated.rows)
    best = rows[0].keys
    result = LayoutsResult(
        is_ranking=True,
        job=request.name,
        model=model.name,
        cluster=cluster.name,
        num_gpus=request.num_gpus,
        seq_len=request.seq_len,
        global_batch=request.batch,
        num_layouts=len(layouts) + num_too_large,
        num_too_large=search.num_too_large,
        num_certain=sum(row.iteration_s <= search.least_bound_s for row in rows),
        memory_limit_bytes=cluster.gpu.memory_bytes,
        rows=rows,
        interrupted=interrupted,
        notes=(*notes, *_notes(request, search, len(layouts))),
    )
    return _write(result, request.out, request.spec(best), request.tables(best), Path())


def fastest_layout(request: LayoutsRequest) -> Keys | None:
    """The fastest layout of the ranking, as keys of `[parallel]`; None where none fits."""
    layouts, num_too_large, _ = _candidates(request, load_model(request.model), _cluster(request))
    simulated = _Simulated()
    search = LayoutSearch(layouts, simulated, KEPT, MOST_SIMULATED, num_too_large=num_too_large)
    for _ in search.run():
        pass
    return _ranked(simulated.rows)[0].keys if simulated.rows else None


def _cluster(request: LayoutsRequest) -> Cluster:
    return cluster_of(request.cluster, request.num_gpus)


def least_gpus(request: LayoutsRequest) -> int | None:
    """The fewest GPUs, of the request's doubled again and again, on which a layout fits; None if there are none."""
    model = load_model(request.model)
    for doublings in range(1, MOST_DOUBLINGS + 1):
        more = replace(request, num_gpus=request.num_gpus << doublings)
        if any(_fits_some(more, framework, model) for framework in request.frameworks):
            return more.num_gpus
    return None


def _fits_some(request: LayoutsRequest, framework: str, model: TransformerModel) -> bool:
    """Whether a layout of the framework fits: of each degrees the one that needs the least memory is looked at."""
    base = None
    space = _space(request, framework, model, _cluster(request))
    for degrees in space.degrees():
        every = list(space.layouts(degrees))
        base = base or _first_step(request, every)
        step = None if base is None else next(filter(None, (_with_keys(base, keys) for keys in every)), None)
        if step is None or not step.fits:
            continue
        try:
            return _sequence_s(step) > 0
        except LagomError:  # what it cannot build of one layout it cannot of any
            return False
    return False


def _space(request: LayoutsRequest, framework: str, model: TransformerModel, cluster: Cluster) -> LayoutSpace:
    return LayoutSpace(
        model=model,
        rules=load_rules(framework),
        num_gpus=request.num_gpus,
        gpus_per_node=cluster.gpus_per_node,
        seq_len=request.seq_len,
        global_batch=request.batch,
    )


def _candidates(
    request: LayoutsRequest, model: TransformerModel, cluster: Cluster
) -> tuple[list[_Layout], int, list[str]]:
    """The layouts that may fit, how many do not because the smallest of their degrees does not, and what to know."""
    found, num_too_large, notes = list[_Layout](), 0, list[str]()
    for framework in request.frameworks:
        space = _space(request, framework, model, cluster)
        base, rates = None, dict[tuple[object, ...], float]()
        for degrees in space.degrees():
            every = list(space.layouts(degrees))
            if base is None and every:
                base = _first_step(request, every)
            if base is None:
                continue
            steps = [(keys, step) for keys in every if (step := _with_keys(base, keys)) is not None]
            if steps and not steps[0][1].fits:  # the least memory comes first
                num_too_large += len(steps)
                continue
            try:
                found += [
                    _Layout(
                        keys=keys,
                        step=step,
                        family=_family(step),
                        micro_batch=step.layout.micro_batch,
                        bound_s=_bound_s(step, rates),
                    )
                    for keys, step in steps
                ]
            except LagomError as error:  # what it cannot build of one layout it cannot of any
                notes.append(f"No layout of {framework}: {error}.")
                break
    return found, num_too_large, notes


def _first_step(request: LayoutsRequest, every: Sequence[Keys]) -> JobStep | None:
    """A job of the framework, of which others differ in their layout alone; None if none of them can be built."""
    for keys in every:
        try:
            return job_step(request.spec(keys))
        except LagomError:
            continue
    return None


def _with_keys(base: JobStep, keys: Keys) -> JobStep | None:
    """The job with another layout, as its file would be read; None where it cannot be built."""
    try:
        table = msgspec.convert({**keys}, ParallelTable)
        layout = base.rules.completed(table, base.precision)
        check_layout(base.model, layout, base.cluster, base.seq_len)
    except LagomError:
        return None
    return replace(base, layout=layout)


def _family(step: JobStep) -> tuple[Hashable, ...]:
    layout = step.layout
    return (step.rules.name, layout.tensor, layout.context, layout.pipeline, layout.expert)


def _bound_s(step: JobStep, rates: dict[tuple[object, ...], float]) -> float:
    """What the iteration's computations take at least, in the turns that the pipeline allows (s).

    `rates` are the seconds of computation per sequence in the framework's largest matrices, by what is recomputed.
    """
    layout = step.layout
    key = (layout.recompute, layout.recompute_modules)
    if key not in rates:
        rates[key] = _sequence_s(step)
    turns = layout.num_micro_batches + (layout.pipeline - 1) / layout.chunks
    return rates[key] * layout.micro_batch * turns / (layout.tensor * layout.context * layout.pipeline)


def _sequence_s(step: JobStep) -> float:
    """Seconds of computation per sequence where nothing is cut: no products are larger, so none are more efficient."""
    model, num = step.model, step.layout.num_gpus
    expert = max((size for size in range(1, num + 1) if num % size == model.num_experts % size == 0), default=1)
    whole = replace(
        step.layout,
        tensor=1,
        context=1,
        pipeline=1,
        data=num,
        expert=expert if model.num_experts else 1,
        micro_batch=MICRO_BATCHES[-1],
        global_batch=MICRO_BATCHES[-1] * num,
        sequence_parallel=False,
        whole_experts=False,
        schedule=type(step.layout)().schedule,
        chunks=1,
        micro_batch_group=0,
        pipeline_layout="",
        overlap_p2p=False,
        tables_as_layers=False,
    )
    times = replace(step, layout=whole).times
    return times.last_stage.compute_s / MICRO_BATCHES[-1]


@dataclass(slots=True)
class _Simulated:
    """Simulates layouts and keeps what comes of them, not the steps, which hold some MB each."""

    rows: list[LayoutRow] = field(default_factory=list)

    def __call__(self, one: _Layout) -> float | Outcome:
        step = replace(one.step)
        if not step.fits:
            return Outcome.TOO_LARGE
        try:
            row = _row(step, one.keys)
        except LagomError:
            return Outcome.REFUSED
        if not isfinite(row.iteration_s):
            return Outcome.REFUSED
        self.rows.append(row)
        return row.iteration_s


def _followed(steps: Iterator[SearchProgress], on_progress: OnProgress) -> bool:
    """Goes through a search's steps; a signal ends it after the one at hand. Returns whether one came."""
    signals = list[bool]()
    with noted(lambda: signals.append(True)):
        for progress in steps:
            on_progress(progress)
            if signals:
                return True
    return False


def _row(step: JobStep, keys: Mapping[str, Any]) -> LayoutRow:
    times, layout = step.times, step.layout
    return LayoutRow(
        keys=dict(keys),
        num_gpus=layout.num_gpus,
        num_tokens=layout.global_batch * step.seq_len,
        iteration_s=times.iteration_s,
        tokens_per_s=layout.global_batch * step.seq_len / times.iteration_s,
        mfu=times.mfu(layout.num_gpus, step.operators.peak_flops),
        exposed_share=spent(times).exposed_s / times.iteration_s,
        memory_bytes=step.most_bytes,
    )


def _ranked(rows: Sequence[LayoutRow]) -> tuple[LayoutRow, ...]:
    """By tokens per second, the fastest first, and of equals what needs less memory; the frontier is marked."""
    ordered = sorted(rows, key=lambda row: (-row.tokens_per_s, row.memory_bytes))
    least = accumulate((row.memory_bytes for row in ordered), min, initial=1 << 62)
    return tuple(
        replace(row, is_on_frontier=row.memory_bytes < before) for row, before in zip(ordered, least, strict=False)
    )


def _notes(request: LayoutsRequest, search: LayoutSearch[_Layout], num: int) -> tuple[str, ...]:
    notes = []
    if request.global_batch is None:
        notes.append(
            f"Global batch: {request.batch} sequences of {request.seq_len} tokens, {SEQUENCES_PER_GPU} per GPU; "
            "--global-batch and --seq-len change it."
        )
    if search.was_cut:
        notes.append(
            f"The search ended after {len(search.times)} simulations, before all layouts were simulated that were "
            f"expected to be among the first {KEPT}."
        )
    elif num > len(search.times):
        notes.append(
            f"Not simulated: layouts that do not fit, and those that are not expected to be among the first {KEPT}. "
            "What a layout is expected to take: its computation's lower bound, scaled as in similar simulated layouts."
        )
    return (*notes, f"Not tried: {'; '.join(NOT_TRIED)}.")


def _write(
    result: LayoutsResult, out: Path | None, best: JobSpec, tables: Mapping[str, Any], source: Path
) -> LayoutsResult:
    """Writes the run folder; `tables` are those of the best job, of a file in folder `source`."""
    from lagom_overlap.report.layouts import render_layouts  # noqa: PLC0415 - for a run folder alone

    folder = RunFolder.create(out, result.job)
    result = replace(result, files=tuple(folder.path / name for name in _FILES))
    row = result.rows[0]
    head = (
        f"The fastest of {len(result.rows)} simulated layouts: {format_seconds(row.iteration_s)} per iteration, "
        f"{format_memory(row.memory_bytes)} per GPU, MFU {100 * row.mfu:.1f} %.",
        "Predicted by lagom simulate, not measured.",
    )
    folder.write(
        RunRecord.now(RunKind.LAYOUTS, seed=None, job=best),
        result,
        {
            BEST_FILE: job_toml(moved(tables, source, folder.path), head),
            "report.html": lambda: render_layouts(result).encode(),
        },
    )
    return result


def run_variants(
    variants: JobVariants, out: Path | None = None, on_progress: OnProgress = lambda _: None
) -> LayoutsResult:
    """Ranks every combination of a job file's values, and writes the run folder with the fastest as a job file.

    Where the cluster says its nodes, `replicate` (with `fsdp`) or `data` fills the GPUs, unless it is given or varied.

    Raises:
        LagomError: if no combination can be simulated.
    """
    RunFolder.check(out)
    asked = list(variants.combinations())
    every = [_filled(variants, values) for values in asked]
    rows, every_values, refused = list[LayoutRow](), list[Values](), list[RefusedVariant]()
    num_too_large = 0

    def simulated() -> Iterator[SearchProgress]:
        nonlocal num_too_large
        for number, values in enumerate(every, start=1):
            try:
                step = job_step(variants.spec(values))
                if step is None:
                    raise JobError("only a job with a named model ([model] name) is compared")
                num_too_large += not step.fits
                check_memory(step)
                rows.append(_row(step, _shown(values)))
                every_values.append(values)
            except LagomError as error:
                refused.append(RefusedVariant(keys=_shown(values), why=str(error).removeprefix(f"{variants.where}: ")))
            best_s = max(rows, key=lambda row: row.tokens_per_s).iteration_s if rows else None
            yield SearchProgress(num_simulated=number, most=len(every), best_s=best_s)

    interrupted = _followed(simulated(), on_progress)
    if not rows:
        if interrupted:
            raise KeyboardInterrupt
        why = Counter(one.why for one in refused).most_common(1)[0][0]
        raise JobError(f"{variants.where}: none of {len(every)} variants can be simulated: {why}")
    ranked = _ranked(rows)
    best = next(one for one in every_values if _shown(one) == ranked[0].keys)
    first = job_step(variants.spec(best))
    assert first is not None, "it was simulated"
    result = LayoutsResult(
        is_ranking=False,
        job=variants.spec(best).job.name,
        model=first.model.name,
        cluster=first.cluster.name,
        num_gpus=first.layout.num_gpus,
        seq_len=first.seq_len,
        global_batch=first.layout.global_batch,
        num_layouts=len(every),
        num_too_large=num_too_large,
        num_certain=0 if interrupted else len(rows),
        memory_limit_bytes=first.cluster.gpu.memory_bytes,
        rows=ranked,
        refused=tuple(refused),
        interrupted=interrupted,
        notes=_filled_notes({key for values in every for key in values} - {*asked[0]}),
    )
    return _write(result, out, variants.spec(best), variants.with_values(best), variants.folder)


def _shown(values: Values) -> Mapping[str, Any]:
    """The values, without the table's name where that is [parallel]."""
    return {key.removeprefix("parallel."): value for key, value in values.items()}


_DEGREES: Final = ("tensor", "pipeline", "context")


def _filled(variants: JobVariants, values: Values) -> Values:
    """The values, with as much data parallelism as fills the cluster where one of the other degrees varies.

    Groups of FSDP are repeated (`replicate`); where the job has none, `data` is what is left of the cluster.
    """
    tables = variants.with_values(values)
    cluster, parallel = tables.get("cluster", {}), tables.get("parallel", {})
    varies = any(f"parallel.{key}" in values for key in (*_DEGREES, "fsdp"))
    filling, cut_by = ("replicate", (*_DEGREES, "fsdp")) if "fsdp" in parallel else ("data", _DEGREES)
    has_copies = filling == "data" or parallel.get("expert", 1) == 1  # with experts, FSDP is not repeated
    if not varies or not has_copies or {filling, "data"} & {*parallel} or "nodes" not in cluster:
        return values
    try:
        num_gpus = stated_cluster(msgspec.convert(cluster, ClusterTable)).num_gpus
        cut = prod(parallel.get(key, 1) for key in cut_by)
        is_full = num_gpus == cut and filling == "replicate"
        return values if is_full or num_gpus % cut else {**values, f"parallel.{filling}": num_gpus // cut}
    except (LagomError, msgspec.ValidationError, TypeError, ZeroDivisionError):
        return values  # what is wrong with them is told where the job is read


def _filled_notes(filled: Set[str]) -> tuple[str, ...]:
    """Which keys were given values that nobody asked for."""
    keys = " and ".join(sorted(filled))
    return (f"{keys} fills the cluster's GPUs: neither the file nor --set gives it.",) if filled else ()
