"""Concerto's planning time: what each round of odd-even blocks brings, and how long it takes.

The paper: about 30 s a round on ViT under ZeRO-3 on 8 GPUs, near its best after about 4 rounds; about 2 s a round on
WideResNet, about 6 rounds (ASPLOS 2025; the block size is not printed, 50 operators here).
"""

import time
from collections.abc import Iterator

from lagom_overlap.capture.models.named import capture_named
from lagom_overlap.plan.base import PlanProblem
from lagom_overlap.plan.cpsat import BlockMode, odd_even
from lagom_overlap.plan.deadline import Deadline
from lagom_overlap.plan.schedule import simulate, task_graph
from plan_papers.concerto_captured import IMAGES, rig
from plan_papers.judged import table, times_of

GPUS = 8
NUM_ROUNDS, LIMIT_S = 6, 90.0
BLOCK_SIZE = 50


def rounds(_: float) -> Iterator[str]:
    """Length of the step after each round, over its length in program order; seconds of a round."""
    yield "## Concerto: rounds of odd-even blocks, ZeRO-3 on 8 A800"
    yield ""
    rows = []
    for model, stated in (("vit-l-14", "30 s, best after 4"), ("wide-resnet-50-2", "2 s, best after 6")):
        step = capture_named(model, {"fsdp": GPUS}, micro_batch=IMAGES, seq_len=1).iteration
        cluster = rig(GPUS)
        graph = task_graph(PlanProblem(iteration=step, cluster=cluster, times=times_of(cluster)))
        program_order = simulate(graph, range(len(graph))).makespan
        for mode in BlockMode:
            ends: list[int] = []
            started = time.perf_counter()
            odd_even(
                graph,
                range(len(graph)),
                mode=mode,
                block_size=BLOCK_SIZE,
                num_rounds=NUM_ROUNDS,
                deadline=Deadline(LIMIT_S),
                on_round=ends.append,
            )
            seconds = (time.perf_counter() - started) / len(ends)
            cells = [f"{end / program_order:.3f}" for end in ends] + ["-"] * (NUM_ROUNDS - len(ends))
            rows.append([model, str(len(graph)), mode.replace("_", " and "), *cells, f"{seconds:.1f}", stated])
    head = (
        "model",
        "operators",
        "blocks",
        *(f"round {n + 1}" for n in range(NUM_ROUNDS)),
        "seconds per round",
        "paper",
    )
    yield from table(head, rows)
