"""Products next to RCCL on MI300X and MI350, and products on some of the compute units, as the model has them.

A product and a collective that were measured alone enter with those times; what is predicted is what they do to each
other. Protocol of the sources: the collective is issued first, the product behind it on another stream; in the series
`inflection` a GPU sleep of 100,000 cycles precedes the product inside its pair of events. Where the product was timed
on warm buffers, the run next to the collective is cold: it reads its operands again from memory, as far as they fit the
last-level cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from typing import Final

from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol
from lagom_overlap.cost import ContentionModel, Profile
from lagom_overlap.cost.kernels import product_of_time
from lagom_overlap.cost.operators.gemm import wide_tiles
from lagom_overlap.errors import LagomError
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.units import MS
from lagom_overlap.workload import CommOp, CompOp, Kernel, OverlapGroup
from measured_limits import check_possible, check_slowdown, collective_floor_s, product_floor_s
from measured_overlap.judged import Judged
from measured_rows import BadRowError, NotModelledError, Row

COLUMNS: Final = ("gpu", "gemm_kernel", "m", "n", "k", "collective", "comm_bytes", "series")
"""What tells such a file; columns of times that it lacks are values that it does not have."""
CURVE_COLUMNS: Final = ("gpu", "m", "n", "k", "kernel", "cus", "med_ms")
PRESETS: Final = {"MI300X": "mi300x", "MI350": "mi350x", "MI350X": "mi350x", "MI355X": "mi355x"}
SLEEP_S: Final = 100_000 / 2.1e9
"""100,000 cycles of an MI300X at its peak clock (data sheet, Dec 2023)."""
WARM: Final = ("rccl_channel_sweep", "doc_shapes_warm", "mi350_grid", "mi355_ws", "mi355_readme")
"""Series whose time alone is of warm buffers."""
MOST_CHANNELS: Final = 1024
"""More than any release of NCCL or RCCL has."""
PERSISTENT_TILE: Final = 256
"""tritonBLAS's tiles are 256 x 256."""
UNCLAIMED: Final = ("torch", "ws_grid")
"""Kernels of the curves that do not run on the compute units named: masks that hit dies unevenly (16 units take as long
as 8), and grids that are rounded to multiples of 32 (8 to 48 units take as long)."""


@dataclass(frozen=True, slots=True)
class Protocols:
    """What the sources' clocks hold besides the kernels; chosen with the table in sight, for all series at once.

    The host's time between the two launches, what passes between the product's first event and its first workgroup
    while RCCL's kernel occupies the dispatcher, and what the wall clock holds around both.
    """

    lead_s: float = 45e-6
    dispatch_s: float = 20e-6
    around_s: float = 20e-6


@cache
def cluster_of(gpu: str) -> Cluster:
    """The preset of a GPU as the files name it.

    Raises:
        BadRowError: if there is none.
    """
    if gpu not in PRESETS:
        raise BadRowError(f"unknown GPU {gpu[:40]!r}; known here: {', '.join(sorted(PRESETS))}")
    return load_preset(PRESETS[gpu])


def kind_of(kernel: str) -> str:
    """dispatched, static or stealing."""
    name = kernel.lower()
    if "torch" in name or "hipblaslt" in name:
        return "dispatched"
    if "static" in name or "ck" in name.split() or "primus" in name:
        return "static"
    if "work-stealing" in name or name.startswith("ws"):
        return "stealing"
    raise NotModelledError(f"kernel {kernel[:60]!r} is none of torch, static, work-stealing")


def kernel_of(row: Row, cluster: Cluster, profile: Profile, alone_s: float) -> Kernel:
    """The product of a row as the hardware runs it."""
    (m, n, k), cus, kind = row.shape(), cluster.gpu.num_sms, kind_of(row.text("gemm_kernel"))
    flops, text = 2.0 * m * n * k, row.text("grid_or_active_cus")
    given = None if text in ("", "all") else row.count("grid_or_active_cus")
    tiles = ceil(m / PERSISTENT_TILE) * ceil(n / PERSISTENT_TILE)
    grid: int | None = None
    if kind == "dispatched":
        blocks = row.count("tiles") or wide_tiles(m, n, cus)
    elif kind == "static":  # equal shares, in whole rounds
        blocks = given or ceil(tiles / ceil(tiles / cus))
    else:
        blocks, grid = tiles, None if text == "all" else min(cus, given or cus)
    return product_of_time(cluster.gpu, profile, alone_s=alone_s, flops=flops, num_blocks=blocks, grid=grid)


def alone_of(row: Row, cluster: Cluster) -> tuple[float, float]:
    """The time alone that a slowdown refers to, and the time alone in the state of the run next to the collective."""
    warm = row.text("series") in WARM
    column = "gemm_alone_ms" if warm else "gemm_rotating_ms"
    value = row.number(column)
    if value is None and not warm:
        column, value = "gemm_alone_ms", row.number("gemm_alone_ms")
    if value is None:
        raise NotModelledError("no time of the product alone")
    alone_s = value * MS
    check_possible(column, alone_s, product_floor_s(row.shape(), cluster.gpu, row.text("dtype")), "the product")
    if not warm:
        return alone_s, alone_s
    m, n, k = row.shape()
    operands = min(2 * (m * k + n * k), cluster.gpu.l2_bytes)
    return alone_s, alone_s + operands / cluster.gpu.hbm_bytes_per_s


def collective_of(row: Row, cluster: Cluster, model: ContentionModel) -> tuple[Collective, CommConfig]:
    """The collective of a row, of as many bytes as take the time that it took alone."""
    name, num_bytes = row.text("collective"), row.count("comm_bytes")
    if not name or num_bytes is None:
        raise NotModelledError("no collective beside the product")
    try:
        kind = CollectiveKind(name)
    except ValueError:
        raise BadRowError(f"unknown collective {name[:40]!r}") from None
    channels = None if row.text("channels") in ("", "unset", "default") else row.count("channels")
    if channels is not None:  # a cap in the sources: RCCL runs with its own where that is fewer
        if channels > MOST_CHANNELS:
            raise BadRowError(f"channels is {channels}, must lie in 1..{MOST_CHANNELS}")
        channels = min(channels, cluster.gpu.num_sms - 1)
    config = CommConfig(num_channels=channels)
    if kind is CollectiveKind.ALL_REDUCE:
        config = replace(config, algorithm=Algorithm.RING, protocol=Protocol.SIMPLE)
    if kind is CollectiveKind.ALL_GATHER:  # the files give what each rank sends
        num_bytes *= cluster.num_gpus
    collective = Collective(kind, num_bytes, cluster.num_gpus)
    alone = row.number("comm_alone_ms")
    if alone is None:
        return collective, config
    check_possible("comm_alone_ms", alone * MS, collective_floor_s(num_bytes, cluster.num_gpus), name)
    for _ in range(3):  # time is a straight line of the bytes but for the last chunk
        ratio = alone * MS / model.collective(collective, config).seconds()
        collective = replace(collective, num_bytes=max(1, int(collective.num_bytes * ratio)))
    return collective, config


def judge(row: Row, profile: Profile, protocols: Protocols = Protocols()) -> list[Judged]:
    """The slowdowns and the makespan of a row.

    Raises:
        BadRowError: if the row is wrong.
        NotModelledError: if the model does not cover it.
    """
    cluster = cluster_of(row.text("gpu"))
    cus = cluster.gpu.num_sms
    if row.cells.get("cus", "").strip() not in ("", str(cus)):
        raise BadRowError(f"cus is {row.text('cus')[:40]}, but a {cluster.gpu.name} has {cus}")
    series, note = row.text("series"), row.text("note")
    kind = kind_of(row.text("gemm_kernel"))
    if series == "doc_hog" or "pathology" in note:
        raise NotModelledError("a synthetic kernel, or masked compute units, in place of a collective")
    if "unreliable" in note:
        raise NotModelledError("the source calls its time alone unreliable")
    model = ContentionModel(cluster, profile)
    base_s, alone_s = alone_of(row, cluster)
    sleep_s = SLEEP_S if series.startswith("inflection") else protocols.dispatch_s
    collective, config = collective_of(row, cluster, model)
    kernel = kernel_of(row, cluster, profile, alone_s)
    idle = Kernel(num_blocks=1, blocks_per_sm=1, wave_s=protocols.lead_s + sleep_s, block_bytes=0.0)
    group = OverlapGroup(
        name="row",
        computations=(CompOp(name="host", work=idle), CompOp(name="gemm", work=kernel)),
        comms=(CommOp(name="comm", collective=collective),),
    )
    try:
        simulator = GroupSimulator(group, model)
        spans = {span.name: span for span in simulator.timeline((config,)).spans}
    except LagomError as error:
        raise BadRowError(str(error)) from None
    gemm, comm = spans["gemm"], spans["comm"]
    m, n, k = row.shape()
    family = f"{m}x{n}x{k}"
    found: list[Judged] = []

    def add(quantity: str, measured: float | None, predicted: float) -> None:
        if measured is not None:
            found.append(
                Judged(
                    line=row.line,
                    quantity=quantity,
                    series=series.split(":")[0],
                    kind=kind,
                    family=family,
                    measured=measured,
                    predicted=predicted,
                )
            )

    overlapped = row.number("overlap_gemm_ms")
    if overlapped is not None:
        check_slowdown("overlap_gemm_ms", overlapped * MS, base_s)
    predicted_s = gemm.end_s - gemm.start_s + sleep_s
    add("computation_slowdown", None if overlapped is None else overlapped * MS / base_s, predicted_s / base_s)
    alone, beside = row.number("comm_alone_ms"), row.number("overlap_comm_ms")
    if alone is not None and beside is not None:
        check_slowdown("overlap_comm_ms", beside, alone)
        add("communication_slowdown", beside / alone, (comm.end_s - comm.start_s) / (alone * MS))
    wall = row.number("overlap_wall_ms")
    if wall is not None and series != "mi350_grid":
        check_slowdown("overlap_wall_ms", wall * MS, max(base_s, 0.0 if alone is None else alone * MS))
        add("makespan", wall * MS, max(gemm.end_s, comm.end_s) + protocols.around_s)
    if not found:
        raise NotModelledError("nothing measured next to the collective")
    return found


def judge_curve(row: Row, rows: Sequence[Row], profile: Profile) -> list[Judged]:
    """The time of a product on some of the compute units, from its time on all of them.

    Raises:
        BadRowError: if the row is wrong.
        NotModelledError: if the model does not cover it.
    """
    cluster, kernel = cluster_of(row.text("gpu")), row.text("kernel")
    gpu, cus, shape = cluster.gpu, row.count("cus"), row.shape()
    if cus is None or cus > gpu.num_sms:
        raise BadRowError(f"cus is {row.text('cus')!r}, must lie in 1..{gpu.num_sms}")
    key = ("gpu", "kernel", "m", "n", "k")
    same = (other for other in rows if all(other.text(name) == row.text(name) for name in key))
    whole = next((other for other in same if other.text("cus") == str(gpu.num_sms)), None)
    if whole is None:
        raise NotModelledError("the file has no time of this product on all compute units")
    least_s = product_floor_s(shape, gpu)
    try:
        whole_s = whole.needed("med_ms") * MS
        check_possible("med_ms", whole_s, least_s, "the product")
    except BadRowError as error:
        if row is whole:
            raise
        raise BadRowError(f"its time on all compute units, line {whole.line}, is wrong: {error}") from None
    if row is whole:
        raise NotModelledError("the time on all compute units is the model's input")
    if cus % gpu.num_xcds:
        raise NotModelledError("compute units that are not spread evenly over the dies")
    m, n, k = shape
    tiles, grid = ceil(m / PERSISTENT_TILE) * ceil(n / PERSISTENT_TILE), None if kernel == "torch" else gpu.num_sms
    blocks = wide_tiles(m, n, gpu.num_sms) if kernel == "torch" else tiles
    held = product_of_time(gpu, profile, alone_s=whole_s, flops=2.0 * m * n * k, num_blocks=blocks, grid=grid)
    fewer = ContentionModel(replace(cluster, gpu=replace(gpu, num_sms=cus)), profile)
    seconds = fewer.kernel_seconds(held if grid is None else replace(held, grid=cus))
    measured_s = row.needed("med_ms") * MS
    share = 1.0 if kernel in UNCLAIMED else cus / gpu.num_sms
    check_possible("med_ms", measured_s, least_s / share, f"the product on {cus} compute units")
    return [
        Judged(
            line=row.line,
            quantity="product_on_fewer_cus",
            series="cu_curve",
            kind=kernel,
            family=f"{m}x{n}x{k}",
            measured=measured_s,
            predicted=seconds,
            claimed=kernel not in UNCLAIMED,
        )
    ]
