"""How many assignments of one overlap group a core evaluates per second.

The group has 32 computations (four transformer layers of eight kernels) and 4 collectives; every evaluation takes an
assignment not seen before. A second figure asks for a fresh simulator per round, so that nothing is memoised yet.

    python benchmarks/simulation_speed.py [--evaluations N] [--rounds N] [--seed N] [--json]
"""

import argparse
import json
import random
import sys
import time
from itertools import chain
from statistics import median, quantiles

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, ConfigSpace
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.workload import Attention, CommOp, CompOp, Gemm, MemoryBound, OverlapGroup

TARGET_PER_S = 2000
TOKENS, HIDDEN, FFN = 4096, 2560, 10240


def group() -> OverlapGroup:
    """Four Phi-2 layers beside two all-gathers and two reduce-scatters of a layer's weights."""
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


def main() -> int:
    """Measure and print; exit code 1 if the median misses the target."""
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
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{len(work.computations)} computations, {len(work.comms)} collectives; bit-identical: {identical}")
        for name, row in rows.items():
            print(f"  {name:28} {row['median_per_s']:8.0f}/s  [{row['q25_per_s']:.0f}, {row['q75_per_s']:.0f}]")
    return 0 if identical and rows["kept simulator"]["median_per_s"] >= TARGET_PER_S else 1


if __name__ == "__main__":
    sys.exit(main())
