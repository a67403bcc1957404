"""Concerto's tables 3 (ablation on GPT) and 4 (fusion) (ASPLOS 2025)."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lagom_overlap.hardware import Link, LinkKind, load_preset
from lagom_overlap.planners.base import OpTimes, PlanProblem
from lagom_overlap.planners.concerto.fusion import FusionLimits, fused
from lagom_overlap.planners.concerto.planner import Concerto
from lagom_overlap.planners.deadline import Deadline, SearchBudget
from lagom_overlap.planners.megatron.planner import Megatron
from lagom_overlap.planners.predict import predict
from lagom_overlap.workload import CommOp, Op
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.precision import HALF
from lagom_overlap.workload.step import Unit, program_step
from plan_papers.grid import LAYERS_AHEAD, MATRICES, SEQ_LEN, sharded
from plan_papers.judged import predicted, table, times_of, verdict

A800_NVLINK = Link(kind=LinkKind.NVLINK, bytes_per_s=160e9, hop_s=1e-6)
"""A800: 400 GB/s both directions, 200 one, of which about 160 are reached."""
A800_PCIE = Link(kind=LinkKind.PCIE, bytes_per_s=20e9, hop_s=2e-6)
A800_NETWORK = Link(kind=LinkKind.NETWORK, bytes_per_s=90e9, hop_s=5e-6)
FP32_COMPUTATION = 1384.5 / 290.3
"""The paper's own computations of (D2, T4, P1): FP32 over FP16."""


@dataclass(frozen=True, slots=True)
class InFp32:
    """Times of the same step in FP32: computations by the paper's own ratio, twice the bytes on the wire."""

    half: OpTimes

    def seconds(self, op: Op) -> float:
        """Seconds of one operator alone."""
        if isinstance(op, CommOp):
            doubled = replace(op.collective, num_bytes=2 * op.collective.num_bytes)
            return self.half.seconds(replace(op, collective=doubled))
        return FP32_COMPUTATION * self.half.seconds(op)


def gpt(name: str, hidden: int, heads: int) -> TransformerModel:
    """The paper's GPT: 18 layers, four times as wide in the MLP."""
    return TransformerModel(
        name=name,
        num_layers=18,
        hidden=hidden,
        ffn=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab=51200,
        gated=False,
        linear_bias=True,
        norm_bias=True,
    )


def concerto_problem(
    model: TransformerModel,
    layout: ParallelLayout,
    *,
    nvlink: bool,
    fp32: bool,
    work: SearchBudget,
    unit: Unit = Unit.LAYER,
) -> PlanProblem:
    """A step on the paper's rig: four nodes of eight A800."""
    intra = A800_NVLINK if nvlink else A800_PCIE
    cluster = replace(load_preset("a100_dgx", 4), name="a800", intra=intra, inter=A800_NETWORK)
    step = program_step(model, layout, seq_len=SEQ_LEN, gpus_per_node=8, unit=unit, precision=HALF)
    times: OpTimes = times_of(cluster)
    return PlanProblem(
        iteration=step,
        cluster=cluster,
        times=InFp32(times) if fp32 else times,
        work=work,
        prefetch=LAYERS_AHEAD * (MATRICES if unit is Unit.MATRIX else 1),
    )


TABLE_3 = [
    # tensor, data, NVLink, FP32, Megatron, S, S + AD (s)
    (16, 1, True, False, 0.974, 0.860, 0.817),
    (16, 1, True, True, 3.276, 3.252, 3.127),
    (16, 1, False, False, 3.793, 3.723, 3.584),
    (16, 1, False, True, 6.093, 5.544, 5.178),
    (8, 2, True, False, 0.907, 0.883, 0.866),
    (8, 2, True, True, 4.455, 4.446, 4.366),
    (8, 2, False, False, 2.996, 2.897, 2.788),
    (8, 2, False, True, 6.566, 6.295, 5.616),
]
TABLE_4 = [
    (8, False, 0.517, 0.505),
    (16, False, 0.531, 0.504),
    (32, False, 0.614, 0.468),
    (8, True, 2.732, 2.723),
    (16, True, 2.742, 2.722),
    (32, True, 2.801, 2.771),
]


def concerto(work: SearchBudget) -> Iterator[str]:
    """Tables 3 and 4."""
    yield "## Concerto: GPT on 16 GPUs (Table 3), relative to Megatron"
    yield ""
    model = gpt("gpt-14.5b", 8192, 32)
    rows = []
    for tensor, data, nvlink, fp32, stated, stated_s, stated_ad in TABLE_3:
        layout = ParallelLayout(tensor=tensor, data=data, micro_batch=8 // data, global_batch=8)
        problem = concerto_problem(model, layout, nvlink=nvlink, fp32=fp32, work=work)
        base, scheduled, cut = (
            predicted(problem, planner).overlap.makespan_s
            for planner in (Megatron(), Concerto(decompose=False, fuse=False), Concerto(fuse=False))
        )
        gain, gain_ad = 1 - scheduled / base, 1 - cut / base
        rows.append(
            [
                f"T{tensor} D{data}",
                "NVLink" if nvlink else "PCIe",
                "FP32" if fp32 else "FP16",
                f"{base:.3f}",
                f"{1 - stated_s / stated:.1%}",
                f"{gain:.1%}",
                f"{1 - stated_ad / stated:.1%}",
                f"{gain_ad:.1%}",
                verdict(gain_ad, 1 - stated_ad / stated, built_in=fp32),
            ]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    yield from table(
        (
            "layout",
            "node",
            "type",
            "Megatron here, s",
            "S, paper",
            "S, here",
            "S + AD, paper",
            "S + AD, here",
            "verdict",
        ),
        rows,
    )
    yield "## Concerto: fusion under ZeRO-3 (Table 4)"
    yield ""
    rows = []
    small = gpt("gpt-0.9b", 2048, 16)
    for ranks, fp32, stated, stated_fused in TABLE_4:
        layout = sharded(ranks, 2)
        problem = concerto_problem(small, layout, nvlink=True, fp32=fp32, work=work, unit=Unit.MATRIX)
        scheduled = Concerto(decompose=False, fuse=False).plan(problem).iteration
        steps, merged = fused(
            problem,
            scheduled,
            FusionLimits(max_bytes=400 << 20),
            Deadline.of_work(SearchBudget(10 * work.million_steps)),
        )
        plain, after = (predict(problem, step).overlap.makespan_s for step in (scheduled, merged))
        gain, stated_gain = 1 - after / plain, 1 - stated_fused / stated
        rows.append(
            [
                str(ranks),
                "FP32" if fp32 else "FP16",
                f"{plain:.3f}",
                str(len(steps)),
                f"{stated_gain:.1%}",
                f"{gain:.1%}",
                verdict(gain, stated_gain, built_in=fp32),
            ]
        )
        print(rows[-1], file=sys.stderr, flush=True)
    yield from table(("GPUs", "type", "before here, s", "fusions", "fusion, paper", "fusion, here", "verdict"), rows)
