"""A computation on one GPU during an injector that is resident throughout: our own surface (`benchmarks/gpu`), judged.

A row is a kernel as a trace has it (name, grid, block, time alone), with the shape that its victim's name holds, and
what the injector held and moved. Predicted is the slowdown while the injector runs. What moved is an input: of the
stand-in's bytes half are in user buffers and half in the FIFO; the bytes that two NCCL ranks on this GPU send each
other are touched as often as the model says of any rank's.
"""

import re
from typing import Final

from lagom_overlap.analysis.concurrency_model import modelled_kernel
from lagom_overlap.analysis.groups import KernelKey
from lagom_overlap.analysis.kernel_class import KernelClass, kernel_class
from lagom_overlap.cost import ContentionModel, Profile
from lagom_overlap.cost.lagom_equations import l2_miss_share
from lagom_overlap.errors import LagomError
from lagom_overlap.hardware import Cluster, Gpu, load_preset
from lagom_overlap.trace.gpu_trace import NS_PER_S
from measured_limits import check_possible, check_slowdown, product_floor_s
from measured_overlap.judged import Judged
from measured_rows import BadRowError, NotModelledError, Row, whole

COLUMNS: Final = (
    "gpu", "stage", "victim", "kernel", "grid", "block", "injector", "num_blocks", "chunk_bytes",
    "injector_bytes_per_s", "median_s", "solo_s", "covered",
)  # fmt: skip
PRESETS: Final = {"H100-SXM5-80GB": "h100_dgx"}
FIFO_SLOTS: Final = 8
"""Slots of a channel's FIFO: NCCL_STEPS, and the stand-in's."""
NCCL_BUFFER_BYTES: Final = 4 << 20
"""NCCL_BUFFSIZE's default, the FIFO of a channel; a row's chunk is half of it."""
NCCL: Final = ("all_gather", "reduce_scatter", "all_reduce")
_SHAPE: Final = re.compile(r"gemm_\w+?_(?<!\d)(\d{1,6})x(\d{1,6})x(\d{1,6})$", re.ASCII)


def kind_of(kernel: str) -> str:
    """The kind of victim a kernel is, by its name."""
    if kernel.startswith("nvjet"):
        return "persistent GEMM"
    found = kernel_class(kernel)
    if found is KernelClass.GEMM:
        return "GEMM, a block per tile"
    return "attention" if found is KernelClass.ATTENTION else "memory-bound"


def cluster_of(gpu: str) -> Cluster:
    """The preset of a GPU.

    Raises:
        BadRowError: if there is none.
    """
    if gpu not in PRESETS:
        raise BadRowError(f"unknown GPU {gpu[:40]!r}; known here: {', '.join(PRESETS)}")
    return load_preset(PRESETS[gpu])


def _triple(row: Row, column: str) -> tuple[int, int, int]:
    parts = row.text(column).split("x")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise BadRowError(f"{column} is {row.text(column)[:40]!r}, must be XxYxZ")
    if any(not part.strip("0") for part in parts):
        raise BadRowError(f"{column} is {row.text(column)[:40]!r}, must be positive")
    x, y, z = (whole(part, column) for part in parts)
    return x, y, z


def traffic(row: Row, num_blocks: int, model: ContentionModel) -> tuple[float, float]:
    """What the injector takes of the memory bandwidth (B/s), and its FIFOs (B).

    Raises:
        BadRowError: if the row is wrong.
    """
    injector, chunk = row.text("injector"), row.count("chunk_bytes")
    if injector == "spin":
        return 0.0, 0.0
    rate, profile = row.needed("injector_bytes_per_s"), model.profile
    if injector in NCCL:
        fifo_bytes = float(num_blocks * (NCCL_BUFFER_BYTES if chunk is None else 2 * chunk))
        user, fifo = profile.user_traffic, profile.fifo_traffic
    elif injector in ("paced", "unpaced"):
        if chunk is None:
            raise BadRowError("chunk_bytes is empty")
        fifo_bytes = float((num_blocks + 1) // 2 * FIFO_SLOTS * chunk)
        user, fifo = 0.5, 0.5
    else:
        raise BadRowError(f"unknown injector {injector[:40]!r}")
    gpu = model.cluster.gpu
    missed = l2_miss_share(fifo_bytes, gpu.l2_bytes, profile.l2_share)
    ceiling = profile.max_traffic_share * gpu.hbm_bytes_per_s
    return min(ceiling, profile.amplification * rate * (user + fifo * missed)), fifo_bytes


def shape_of(victim: str) -> tuple[int, int] | None:
    """M and n of a product, None for other victims."""
    found = _SHAPE.search(victim)
    return None if found is None else (int(found[1]), int(found[2]))


def _check_times(victim: str, solo_s: float, median_s: float, gpu: Gpu) -> None:
    """Refuses times that no such victim can have.

    Raises:
        BadRowError: if one is.
    """
    if found := _SHAPE.search(victim):
        m, n, k = (int(found[place]) for place in (1, 2, 3))
        check_possible("solo_s", solo_s, product_floor_s((m, n, k), gpu), victim)
    check_slowdown("median_s", median_s, solo_s)


def judge(row: Row, profile: Profile, with_shape: bool = True) -> list[Judged]:
    """The slowdown of a row; without its shape as from a trace that holds none.

    Raises:
        BadRowError: if the row is wrong.
        NotModelledError: if it was not covered by its injector.
    """
    cluster = cluster_of(row.text("gpu"))
    if row.text("covered") != "true":
        raise NotModelledError("the injector ended before the victim")
    num_blocks, model = row.count("num_blocks"), ContentionModel(cluster, profile)
    if num_blocks is None or num_blocks >= cluster.gpu.num_sms:
        raise BadRowError(f"num_blocks is {row.text('num_blocks')!r}, must lie in 1..{cluster.gpu.num_sms - 1}")
    victim, name, solo_s = row.text("victim"), row.text("kernel"), row.needed("solo_s")
    median_s = row.needed("median_s")
    _check_times(victim, solo_s, median_s, cluster.gpu)
    key = KernelKey(name=name, grid=_triple(row, "grid"), block=_triple(row, "block"))
    try:
        kernel = modelled_kernel(
            key, solo_s * NS_PER_S, cluster.gpu, model.profile, shape_of(victim) if with_shape else None
        )
        bytes_per_s, fifo_bytes = traffic(row, num_blocks, model)
        during_s = model.kernel_seconds(
            kernel, num_channels=num_blocks, traffic_bytes_per_s=bytes_per_s, fifo_bytes=fifo_bytes
        )
        alone_s = model.kernel_seconds(kernel)
    except LagomError as error:
        raise BadRowError(str(error)) from None
    stage = row.text("stage")
    return [
        Judged(
            line=row.line,
            quantity="computation_slowdown",
            series=stage,
            kind=kind_of(name),
            family=victim,
            measured=median_s / solo_s,
            predicted=during_s / alone_s,
        )
    ]
