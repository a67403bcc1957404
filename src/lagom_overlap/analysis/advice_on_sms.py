"""Rules about what collectives take of the GPU: channels, the SMs that a GEMM leaves them, copy engines in their place.

Knobs are named only where they reach: by the kind of collective (`KnobReach`), and by NCCL's version where the trace
says it.
"""

from collections.abc import Iterator
from typing import Final, Literal

from lagom_overlap.analysis.advice import Advice, describe, per_step, per_step_s, stretch, version_of
from lagom_overlap.analysis.collectives import CollectiveKey
from lagom_overlap.analysis.findings import Findings
from lagom_overlap.analysis.kernel_class import KernelClass
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.sim.what_if import COPY_ENGINES, AskedChange
from lagom_overlap.trace.gpu_trace import KnobReach
from lagom_overlap.units import MIB

_HIDDEN: Final = 0.25
"""A collective counts as hidden if at most this part of it is exposed."""
_LARGE: Final = 4 * MIB
"""From here on a call should come near its wire's rate; below it latency may be what it costs. Chosen, not measured."""
_MAX_NODE_RANKS: Final = 8
"""A communicator of more ranks may leave the machine, which copy engines cannot."""
_CTAS_SINCE: Final = (2, 17)
"""The first NCCL whose communicators take minCTAs and maxCTAs."""


def _channel_line(key: CollectiveKey, bound: Literal["min", "max"], channels: int, findings: Findings) -> str:
    """What bounds the channels, and of how much more than this collective."""
    version = version_of(findings)
    if key.reach is KnobReach.P2P_CHANNELS:
        return f"export NCCL_{bound.upper()}_P2P_NCHANNELS={channels}  # of every communicator's point-to-point"
    if version is not None and version < _CTAS_SINCE:
        return f"export NCCL_{bound.upper()}_NCHANNELS={channels}  # of every communicator"
    constructor = "init_process_group" if key.communicator == "default_pg" else "new_group"
    return (
        f"opts = dist.ProcessGroupNCCL.Options(); opts.config.{bound}_ctas = {channels}; "
        f"dist.{constructor}(..., pg_options=opts)  # where {key.communicator} is made; holds for all its collectives"
    )


def fewer_channels(findings: Findings) -> Iterator[Advice]:
    """A hidden collective that stretches kernels: it can take longer."""
    rows = {row.key: row for row in findings.rows}
    for key, slowdown in findings.contention.by_collective.items():
        row = rows.get(key)
        if row is None or key.reach is KnobReach.NONE or not slowdown.is_proven or key.num_channels < 2:
            continue
        if row.exposed_ns > _HIDDEN * row.total_ns:
            continue
        channels = max(1, key.num_channels // 2)
        yield Advice(
            rule="fewer_channels",
            what=f"Give {describe(key)} {channels} channel{'s' if channels > 1 else ''}: at most half of its "
            "stretch goes",
            apply=_channel_line(key, "max", channels, findings),
            evidence=f"{slowdown.num_overlapped} kernel runs during it take {stretch(slowdown)}, "
            f"{per_step(findings, slowdown.stretched_ns)} in all; only "
            f"{100 * row.exposed_ns / row.total_ns:.0f} % of it is exposed",
            predicted_gain_s=per_step_s(findings, slowdown.stretched_ns / 2),
            change=AskedChange.channels(channels).change,
        )


def more_channels(findings: Findings) -> Iterator[Advice]:
    """A large exposed collective whose like runs faster on more channels in the same trace."""
    for row in findings.rows:
        key = row.key
        if key.reach is not KnobReach.TUNER or key.num_bytes < _LARGE or row.busbw_bytes_per_s is None:
            continue
        if key.num_channels < 1 or row.exposed_ns < row.total_ns / 2:
            continue
        better = [
            other
            for other in findings.rows
            if (other.key.op, other.key.communicator, other.key.num_ranks) == (key.op, key.communicator, key.num_ranks)
            and other.key.num_channels > key.num_channels
            and key.num_bytes <= 4 * other.key.num_bytes <= 16 * key.num_bytes
            and (other.busbw_bytes_per_s or 0) >= 1.3 * row.busbw_bytes_per_s
        ]
        if not better:
            continue
        best = max(better, key=lambda other: (other.busbw_bytes_per_s or 0, other.key))
        channels = best.key.num_channels
        yield Advice(
            rule="more_channels",
            what=f"Give {describe(key)} {channels} channels",
            apply=_channel_line(key, "min", channels, findings),
            evidence=f"it runs at {row.busbw_bytes_per_s / 1e9:.1f} GB/s of bus bandwidth and is "
            f"{100 * row.exposed_ns / row.total_ns:.0f} % exposed; {describe(best.key)} reaches "
            f"{(best.busbw_bytes_per_s or 0) / 1e9:.1f} GB/s in this trace",
            predicted_gain_s=per_step_s(
                findings, row.exposed_ns * (1 - row.busbw_bytes_per_s / (best.busbw_bytes_per_s or 1))
            ),
        )


def carve_out(findings: Findings) -> Iterator[Advice]:
    """A GEMM of one block for each SM, which the SMs of a collective push into a second wave."""
    sms = next((rank.trace.num_sms for rank in findings.ranks if rank.trace.num_sms), None)
    gpu = next((rank.trace.gpu_name for rank in findings.ranks if rank.trace.gpu_name), "")
    if sms is None:
        return
    channels = max((row.key.num_channels for row in findings.rows if row.key.num_channels < sms), default=0)
    for kernel in findings.contention.kernels:
        blocks = kernel.grid[0] * kernel.grid[1] * kernel.grid[2]
        slowdown = kernel.found
        if kernel.kernel_class is not KernelClass.GEMM or blocks != sms or not slowdown.is_proven or not channels:
            continue
        gain_ns = slowdown.stretched_ns - slowdown.base_ns * channels / (sms - channels)
        if gain_ns <= 0:
            continue
        blackwell = any(word in gpu for word in ("B100", "B200", "B300", "GB200", "GB300"))
        yield Advice(
            rule="carve_out",
            what=f"Leave {channels} SMs to the collectives: the persistent GEMM waits for a second wave",
            apply=f"stream = torch.cuda.GreenContext.create(num_sms={sms - channels}).Stream()"
            if blackwell
            else f"torch._C._set_sm_carveout_experimental({channels})",
            evidence=f"a GEMM with one block for each of the {sms} SMs takes {stretch(slowdown)} during collectives of "
            f"up to {channels} channels ({slowdown.num_overlapped} runs)",
            predicted_gain_s=per_step_s(findings, gain_ns),
        )
        return


def copy_engine(findings: Findings) -> Iterator[Advice]:
    """All-gathers within a node that stretch kernels, where NCCL can do them without SMs."""
    version = version_of(findings)
    if "FSDP" not in findings.frameworks or version is None or version < (2, 28):
        return
    gathers = [
        (key, slowdown)
        for key, slowdown in findings.contention.by_collective.items()
        if key.op == CollectiveKind.ALL_GATHER and slowdown.is_proven and 2 <= key.num_ranks <= _MAX_NODE_RANKS
    ]
    stretched_ns = sum(slowdown.stretched_ns for _, slowdown in gathers)
    if gathers:
        yield Advice(
            rule="copy_engine_all_gather",
            what="Let the copy engines gather (no SM): at most the stretch during all-gathers goes; "
            "needs one NVLink domain",
            apply='model.set_symm_mem_for_comm("NCCL")  # FSDP2, torch 2.13 or later; start with NCCL_CTA_POLICY=2',
            evidence=f"kernels during {describe(gathers[0][0])} take {stretch(gathers[0][1])}; "
            f"NCCL {version[0]}.{version[1]} has copy-engine collectives",
            predicted_gain_s=per_step_s(findings, stretched_ns),
            change=COPY_ENGINES.change,
        )
