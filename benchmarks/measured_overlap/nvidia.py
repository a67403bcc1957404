"""An all-reduce behind a product on A100 and others, as the model has it.

Protocol of the A100 surface (one host clock around an iteration): two random matrices of N x N and their product in
single precision are issued first, then the clone of a buffer and its all-reduce on another stream, one synchronisation
at the end; "sequential" synchronises in between too. The computation fills the GPU, so the collective has its SMs when
it ends: makespan = computation + clone + collective. The model claims the steady part of a run (`steady_ms`) and rows
whose null test holds; in other rows a clock ramp moves means by up to 25 %.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Final

from lagom_overlap.collective import (
    UNTOUCHED_LAUNCH,
    Algorithm,
    Collective,
    CollectiveKind,
    CommConfig,
    LaunchConfig,
    LaunchOrder,
    Protocol,
    StreamPriority,
    Transport,
)
from lagom_overlap.cost import ContentionModel, Profile
from lagom_overlap.errors import LagomError
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.units import MS
from lagom_overlap.workload import CommOp, CompOp, Gemm, Kernel, OverlapGroup, Work
from measured_gpus import preset_of
from measured_limits import check_possible, collective_floor_s, product_floor_s
from measured_overlap.judged import Judged
from measured_rows import BadRowError, NotModelledError, Row

COLUMNS: Final = ("gpu", "nodes", "gpus", "collective", "bytes", "algorithm", "protocol", "mode")
"""What tells such a file."""
TILE: Final = 128
"""Tiles of cuBLAS's single-precision products, assumed."""
NULL_TOLERANCE: Final = 0.05
_SQUARE: Final = re.compile(r"(\w+).*?(?<!\d)(\d{1,6})x(\d{1,6})x(\d{1,6})$", re.ASCII)


@dataclass(frozen=True, slots=True)
class SinglePrecision:
    """What the A100's single-precision product reaches, and what an iteration costs next to it.

    `flops` of one SM, the datasheet's 19.5 TFLOP/s of 108; `around_s` for the random numbers, launches and the host's
    synchronisation.
    """

    flops: float = 19.5e12 / 108
    around_s: float = 100e-6
    again_s: float = 60e-6
    """A second synchronisation, which "sequential" has."""


@cache
def cluster_of(gpu: str, num_gpus: int, nodes: int) -> Cluster:
    """The preset of a GPU as the file names it, on that many nodes.

    Raises:
        BadRowError: if there is none.
        NotModelledError: if the GPU is known to have none.
    """
    cluster = load_preset(preset_of(gpu), nodes)
    if num_gpus > cluster.num_gpus:
        raise BadRowError(f"{num_gpus} GPUs on {nodes} nodes: {cluster.name} has {cluster.gpus_per_node} per node")
    return cluster


def _config(row: Row) -> CommConfig:
    if "copy engine" in row.text("protocol"):
        return CommConfig(transport=Transport.COPY_ENGINE)
    algorithm, protocol, channels = (row.text(name) for name in ("algorithm", "protocol", "channels"))
    try:
        return CommConfig(
            algorithm=None if algorithm in ("", "auto") else Algorithm(algorithm),
            protocol=None if protocol in ("", "auto") else Protocol(protocol),
            num_channels=None if channels in ("", "default") else row.count("channels"),
        )
    except ValueError:
        known = ", ".join((*Algorithm, *Protocol))
        raise BadRowError(f"{algorithm[:20]!r} with {protocol[:20]!r} is none of NCCL's: {known}") from None


def _work(row: Row, cluster: Cluster, single: SinglePrecision) -> Work:
    name = row.text("compute_kernel")
    match = _SQUARE.search(name)
    if match is None:
        raise NotModelledError(f"the computation is not known: {name[:60]!r}")
    m, n, k = (int(match[place]) for place in (2, 3, 4))
    seconds, column = measured_s(row)
    check_possible(column, seconds, product_floor_s((m, n, k), cluster.gpu, match[1]), "the product")
    if not name.startswith("fp32"):
        return Gemm(m, n, k)
    if not cluster.gpu.name.startswith("A100"):
        raise NotModelledError("single-precision products are known of the A100 only")
    sms = cluster.gpu.num_sms
    waves = ceil(ceil(m / TILE) * ceil(n / TILE) / sms)
    wave_s = 2.0 * TILE * TILE * k / single.flops
    # Whole waves: the source's differences say that the collective gets no SM before the product ends.
    return Kernel(num_blocks=waves * sms, blocks_per_sm=1, wave_s=wave_s, block_bytes=0.0)


def measured_s(row: Row) -> tuple[float, str]:
    """The row's time and which of its columns that is.

    Raises:
        BadRowError: if it has none.
    """
    for column in ("steady_ms", "median_ms", "mean_ms"):
        value = row.number(column)
        if value is not None:
            return value * MS, column
    raise BadRowError("steady_ms, median_ms and mean_ms are empty")


def null_test(row: Row, rows: Sequence[Row]) -> float | None:
    """AUTO over the forced configuration that AUTO logged, in the group of the row; None where nothing was logged."""
    same = ("run", "gpu", "nodes", "gpus", "collective", "bytes", "mode", "compute_kernel", "channels")
    group = [other for other in rows if all(other.text(name) == row.text(name) for name in same)]
    auto = next((other for other in group if other.text("auto_choice")), None)
    if auto is None:
        return None
    chosen = auto.text("auto_choice").lower().split()[:2]
    forced = next((other for other in group if [other.text("algorithm"), other.text("protocol")] == chosen), None)
    if forced is None:
        return None
    try:
        return measured_s(auto)[0] / measured_s(forced)[0]
    except BadRowError:  # another row's cell, which is named there
        return None


def judge(row: Row, rows: Sequence[Row], profile: Profile, single: SinglePrecision = SinglePrecision()) -> list[Judged]:
    """The makespan of a row, or the time of its collective where there is nothing else.

    Raises:
        BadRowError: if the row is wrong.
        NotModelledError: if the model does not cover it.
    """
    gpu, mode, run = row.text("gpu"), row.text("mode"), row.text("run")
    if mode not in ("overlap", "overlap?", "sequential", "comm_only"):
        raise NotModelledError(f"mode {mode[:40]!r}: the collective beside the kernel is not known")
    nodes, num_gpus, num_bytes = (row.count(name) for name in ("nodes", "gpus", "bytes"))
    if nodes is None or num_gpus is None or num_bytes is None:
        raise NotModelledError("nodes, GPUs or bytes are not known")
    if num_gpus % nodes or num_gpus < 2:
        raise BadRowError(f"{num_gpus} GPUs on {nodes} nodes, must be at least 2 and the same number on each")
    cluster = cluster_of(gpu, num_gpus, nodes)
    if nodes > 1 and "Modal" in gpu:
        raise NotModelledError("no source gives the bandwidth of this cloud's network; iterations are bimodal")
    try:
        kind = CollectiveKind(row.text("collective"))
    except ValueError:
        raise NotModelledError(f"collective {row.text('collective')[:40]!r}") from None
    if kind is CollectiveKind.ALL_GATHER:  # the file gives what each rank sends
        num_bytes *= num_gpus
    collective = Collective(kind, num_bytes, num_gpus, num_nodes=nodes if nodes > 1 else None)
    model, config = ContentionModel(cluster, profile), _config(row)
    seconds, column = measured_s(row)
    check_possible(column, seconds, collective_floor_s(num_bytes, num_gpus), kind)
    try:
        alone_s = model.collective(collective, config).seconds()
        predicted = alone_s if mode == "comm_only" else _makespan(row, model, collective, config, single)
    except LagomError as error:
        raise NotModelledError(str(error)) from None
    ratio = null_test(row, rows)
    steady = column == "steady_ms"
    holds = ratio is not None and abs(ratio - 1) <= NULL_TOLERANCE
    surface = "Modal" in gpu
    tested = "null test holds" if holds else "no null test" if ratio is None else "null test fails"
    series = f"{gpu.split()[0]} {'steady' if steady else tested}" if surface else f"{gpu.split()[0]} {run}"
    return [
        Judged(
            line=row.line,
            quantity="collective" if mode == "comm_only" else "makespan",
            series=series,
            kind=mode.rstrip("?"),
            family=f"{gpu.split()[0]} {nodes}x{num_gpus // nodes}",
            measured=seconds,
            predicted=predicted,
            claimed=surface and (steady or holds),
        )
    ]


def _makespan(
    row: Row, model: ContentionModel, collective: Collective, config: CommConfig, single: SinglePrecision
) -> float:
    """Issue order of the source: the computation first."""
    sequential = row.text("mode") == "sequential"
    work = _work(row, model.cluster, single)
    fp32 = isinstance(work, Kernel)
    group = OverlapGroup(
        name="row",
        computations=(CompOp(name="product", work=work),),
        comms=(CommOp(name="comm", collective=collective),),
        starts_after=(1 if sequential else 0,),
    )
    surface = LaunchConfig(order=LaunchOrder.COMPUTATION_FIRST, priority=StreamPriority.NORMAL)
    launch = surface if fp32 else UNTOUCHED_LAUNCH  # elsewhere the source does not say the order
    makespan_s = GroupSimulator(group, model, launch).evaluate((config,)).makespan_s
    if not fp32:
        return makespan_s
    clone_s = 2.0 * collective.num_bytes / model.cluster.gpu.hbm_bytes_per_s
    return makespan_s + clone_s + single.around_s + (single.again_s if sequential else 0.0)
