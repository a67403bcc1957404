"""How fast the simulator is: groups per second, a whole FSDP iteration, a 3-D parallel job on thousands of GPUs.

    python benchmarks/simulation_speed.py [--evaluations N] [--rounds N] [--seed N] [--json]

- group: assignments of 32 computations (four transformer layers of eight kernels) and 4 collectives per second; every
  evaluation takes an assignment not seen before. A second figure asks for a fresh simulator per round, so that nothing
  is memoised yet.
- iteration: eight micro-batches of Llama-3-8B under FSDP on 16 GPUs (6,504 operators), from the loaded operators to the
  timeline, nothing kept between rounds; in ms of CPU time, and relative to a million additions of floats in a Python
  loop, timed between rounds.
- job: a GPT of 8 to 64 layers under tensor 8 x pipeline 8 x data 64 (4,096 GPUs), one rank per distinct role.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from statistics import median, quantiles

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, ConfigSpace
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.operators import load_framework, load_operators
from lagom_overlap.hardware import load_preset
from lagom_overlap.papers.workloads import fsdp_iteration
from lagom_overlap.sim import GroupSimulator, simulate_iteration
from lagom_overlap.sim.training import TrainingSimulator
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, Iteration, MemoryBound, OverlapGroup
from lagom_overlap.workload.models import load_model
from lagom_overlap.workload.parallel import ParallelLayout

TARGET_PER_S = 10_000
ITERATION_TARGET_MS = 50.0
JOB_TARGET_S = 5.0
MICRO_BATCHES = 8
TOKENS, HIDDEN, FFN = 4096, 2560, 10240


def group() -> OverlapGroup:
    """Four Phi-2 layers with two concurrent all-gathers and two reduce-scatters of a layer's weights."""
    works = [
        MemoryBound(TOKENS * HIDDEN * 4),
        Gemm(TOKENS, 3 * HIDDEN, HIDDEN),
        Attention(batch=2, num_heads=32, seq_len=2048, head_dim=80),
        Gemm(TOKENS, HIDDEN, HIDDEN),
        MemoryBound(TOKENS * HIDDEN * 6),
        Gemm(TOKENS, FFN, HIDDEN),
        MemoryBound(TOKENS * FFN * 4),
        Gemm(TOKENS, HIDDEN, FFN),
    ]
    layer_bytes = 12 * HIDDEN**2 * 2
    kinds = [CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER] * 2
    return OverlapGroup(
        name="phi2-4-layers",
        computations=tuple(CompOp(name=f"comp{i}", work=works[i % 8]) for i in range(32)),
        comms=tuple(CommOp(name=f"comm{j}", collective=Collective(k, layer_bytes, 8)) for j, k in enumerate(kinds)),
    )


def assignments(spaces: list[ConfigSpace], count: int, rng: random.Random) -> list[tuple[CommConfig, ...]]:
    """That many different assignments, drawn at random."""
    configs = [list(space) for space in spaces]
    seen: dict[tuple[CommConfig, ...], None] = {}
    while len(seen) < count:
        seen.setdefault(tuple(rng.choice(choices) for choices in configs))
    return list(seen)


def repeated(iteration: Iteration, times: int) -> Iteration:
    """The same step that many times, one after the other."""
    return Iteration(
        f"{iteration.name}x{times}",
        tuple(
            replace(op, name=f"{index}.{op.name}", deps=tuple(f"{index}.{dep}" for dep in op.deps))
            for index in range(times)
            for op in iteration.ops
        ),
    )


def additions(count: int = 1_000_000) -> float:
    """The in-run reference: this many additions in a loop."""
    total = 0.0
    for _ in range(count):
        total += 1.0
    return total


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of this process for a call."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def iteration_figures(rounds: int) -> dict[str, float]:
    """CPU ms of a whole iteration, and its ratio to the reference."""
    step = fsdp_iteration(load_model("llama-3-8b"), num_ranks=16, micro_batch=1, seq_len=4096)
    whole = repeated(step, MICRO_BATCHES)
    model = ContentionModel(load_preset("a40_nvlink"), load_profile("plausible"))
    simulate_iteration(whole, {}, model)
    simulated, reference = [], []
    for _ in range(rounds):
        simulated.append(cpu_s(lambda: simulate_iteration(whole, {}, model)))
        reference.append(cpu_s(additions))
    ratios = [one / other for one, other in zip(simulated, reference, strict=True)]
    return {
        "num_ops": len(whole.ops),
        "median_ms": 1e3 * median(simulated),
        "least_ms": 1e3 * min(simulated),
        "median_ratio_to_a_million_additions": median(ratios),
    }


def job_figures(rounds: int) -> dict[str, float]:
    """CPU seconds of a 4,096-GPU job by its number of layers."""
    cluster = load_preset("a100_dgx", 512)
    layout = ParallelLayout(tensor=8, pipeline=8, data=64, global_batch=2048, overlap_gradients=True, zero_stage=1)
    found = {}
    for num_layers in (8, 16, 32, 64):
        model = replace(load_model("gpt-175b"), num_layers=num_layers)
        simulator = TrainingSimulator(
            model,
            layout,
            seq_len=2048,
            cluster=cluster,
            operators=load_operators(cluster.gpu),
            framework=load_framework("megatron"),
            profile=load_profile("plausible"),
        )
        found[f"{num_layers}_layers_s"] = median(cpu_s(simulator.times) for _ in range(rounds))
    return found


def main() -> int:
    """Measure and print; exit code 1 if a median misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    model = ContentionModel(load_preset("a40_nvlink"), load_profile("plausible"))
    work = group()
    spaces = [model.space(op.collective) for op in work.comms]
    drawn = assignments(spaces, args.evaluations * args.rounds, random.Random(args.seed))
    rounds = [drawn[i :: args.rounds] for i in range(args.rounds)]

    def per_second(simulator: GroupSimulator, batch: list[tuple[CommConfig, ...]]) -> float:
        begin = time.perf_counter()
        for assignment in batch:
            simulator.evaluate(assignment)
        return len(batch) / (time.perf_counter() - begin)

    kept = GroupSimulator(work, model)
    kept.evaluate(drawn[0])
    rows = {}
    for name, rates in (
        ("kept simulator", [per_second(kept, batch) for batch in rounds]),
        ("fresh simulator per round", [per_second(GroupSimulator(work, model), batch) for batch in rounds]),
    ):
        low, _, high = quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else (rates[0],) * 3
        rows[name] = {"median_per_s": median(rates), "q25_per_s": low, "q75_per_s": high}
    again = GroupSimulator(work, model)
    identical = all(kept.evaluate(a) == again.evaluate(a) for a in chain.from_iterable(rounds))
    result = {
        "num_comps": len(work.computations),
        "num_comms": len(work.comms),
        "evaluations_per_round": args.evaluations,
        "rounds": args.rounds,
        "seed": args.seed,
        "target_per_s": TARGET_PER_S,
        "identical": identical,
        "rows": rows,
        "iteration": iteration_figures(args.rounds),
        "job_of_4096_gpus": job_figures(min(args.rounds, 3)),
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{len(work.computations)} computations, {len(work.comms)} collectives; bit-identical: {identical}")
        for name, row in rows.items():
            print(f"  {name:28} {row['median_per_s']:8.0f}/s  [{row['q25_per_s']:.0f}, {row['q75_per_s']:.0f}]")
        for part in ("iteration", "job_of_4096_gpus"):
            print(part)
            for name, value in result[part].items():
                print(f"  {name:36} {value:10.3f}")
    met = (
        identical,
        rows["kept simulator"]["median_per_s"] >= TARGET_PER_S,
        result["iteration"]["median_ms"] <= ITERATION_TARGET_MS,
        result["job_of_4096_gpus"]["64_layers_s"] <= JOB_TARGET_S,
    )
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
