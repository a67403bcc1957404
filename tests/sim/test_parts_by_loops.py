"""The parts of a simulated step against loops over all pairs of its operators."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from lagom_overlap.cost.operators import load_framework, load_operators
from lagom_overlap.cost.profile import load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.sim.columns import Columns
from lagom_overlap.sim.framework import FrameworkModel
from lagom_overlap.sim.step_parts import SimulatedStep, StepWaits, parts_of
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.ops import CommOp, Phase
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule
from lagom_overlap.workload.step import StepBuilder, load_rules
from lagom_overlap.workload.streams import COMPUTE

LAYOUTS = {
    "fsdp2": ParallelLayout(data=8, global_batch=24, zero_stage=3),
    "torchtitan": ParallelLayout(
        data=2, tensor=4, global_batch=6, zero_stage=3, sequence_parallel=True, overlap_tensor=True
    ),
    "megatron": ParallelLayout(
        data=2,
        pipeline=4,
        global_batch=8,
        schedule=PipelineSchedule.INTERLEAVED,
        chunks=2,
        zero_stage=1,
        overlap_gradients=True,
    ),
}


@pytest.mark.parametrize("framework", LAYOUTS)
def test_parts_are_those_of_loops_over_all_pairs_of_operators(framework: str) -> None:
    layout, cluster = LAYOUTS[framework], load_preset("h100_dgx", 1)
    operators = load_operators(cluster.gpu).in_training()
    price = FrameworkModel.of(cluster, load_profile("plausible"), operators, load_framework(framework))
    model = replace(load_model("llama-3-8b"), num_layers=2 * layout.pipeline)
    builder = StepBuilder(model, layout, seq_len=2048, rules=load_rules(framework))
    step = builder.rolled(layout.pipeline - 1, 3).placed_on(cluster)
    columns = Columns(step)
    host_s = price.host_s(columns)
    starts_s, ends_s = map(np.array, price.simulator(step, columns=columns, host_s=host_s).run_as(lambda op: None))
    parts = parts_of(
        SimulatedStep(
            columns=columns, waits=StepWaits(*step.earlier()), starts_s=starts_s, ends_s=ends_s, host_s=host_s
        ),
        price,
        layout.chunks,
        waits_for_sends=not layout.overlap_p2p,
    )

    rows = list(zip(step.unrolled().iteration.ops, starts_s.tolist(), ends_s.tolist(), host_s.tolist(), strict=True))
    comps = [row for row in rows if row[0].stream == COMPUTE and row[0].origin.phase is not Phase.OPTIMIZER]
    comps = [row for row in comps if not isinstance(row[0], CommOp)]
    others = [row for row in rows if row[0].stream != COMPUTE]
    stretched_s: defaultdict[str, float] = defaultdict(float)
    for op, start_s, end_s, gap_s in comps:
        shares = [
            (other.communicator if isinstance(other, CommOp) else "fsdp", min(end_s, until) - max(start_s, begin))
            for other, begin, until, _ in others
        ]
        whole_s = sum(share_s for _, share_s in shares if share_s > 0)
        for name, share_s in shares:
            if share_s > 0:
                stretched_s[name] += (end_s - start_s - price.alone_s(op) - gap_s) * share_s / whole_s
    found = parts.comms(3)
    for name in {*found, *stretched_s}:
        assert found[name].stretched_s == pytest.approx(stretched_s[name], rel=1e-9, abs=1e-15)
        own = [end_s - start_s for op, start_s, end_s, _ in others if getattr(op, "communicator", "") == name]
        assert found[name].total_s == pytest.approx(sum(own), rel=1e-9)
    assert parts.over_batches(3, "compute_s") == pytest.approx(sum(price.alone_s(op) for op, *_ in comps), rel=1e-9)
    assert parts.over_batches(3, "host_s") == pytest.approx(sum(gap_s for *_, gap_s in comps), rel=1e-9)

    busy, until_s = 0.0, 0.0
    for start_s, end_s in sorted((start_s, end_s) for op, start_s, end_s, _ in rows if op.stream == COMPUTE):
        busy += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    idle_s = float(ends_s.max()) - busy  # each instant of it is somebody's, once
    assert sum(times.exposed_s for times in found.values()) == pytest.approx(idle_s, rel=1e-6, abs=1e-12)
