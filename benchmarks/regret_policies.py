"""What a class of assignments leaves at best on the second family of groups, without noise.

    python benchmarks/regret_policies.py --seed 1001 --groups 20 --num-comms 4,8 [--json]

Percent above the oracle's makespan, means; also of the groups whose collectives wait for kernels and whose default
leaves communication exposed. Classes: one setting for all; two and three settings along the stream, cut anywhere; one
algorithm, protocol and chunk for all with channels of each collective's own. Settings are found by coordinate search
from the best equal one (two settings: also from the best three pairs of a lattice of 80), so that the true best may be
a little lower.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import fmean

import numpy as np
import numpy.typing as npt

from lagom_overlap.units import KIB
from measured_generator import MeasuredGroup, draw_group
from overlap_generator import CONFIGS
from search_quality import count, numbers

SIZE = len(CONFIGS)
EVERY = np.arange(SIZE)
LATTICE = [
    place
    for place, config in enumerate(CONFIGS)
    if config.num_channels in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    and config.chunk_bytes in (32 * KIB, 128 * KIB, 512 * KIB, 2048 * KIB)
]
AT_ONCE = 60_000
EXPOSED = 1.02
Places = npt.NDArray[np.intp]


def makespans(group: MeasuredGroup, places: Places) -> npt.NDArray[np.float64]:
    """Of many assignments, (assignments, collectives) into `CONFIGS`."""
    parts = [group._run(places[at : at + AT_ONCE])[2] for at in range(0, len(places), AT_ONCE)]
    return np.concatenate(parts)


def searched(group: MeasuredGroup, part_of: Sequence[int], starts: Iterable[Sequence[int]], allowed: Places) -> float:
    """The best makespan with one setting for each part, found one part after the other."""
    num, best_s = max(part_of) + 1, float("inf")
    for start in starts:
        now, now_s, since_better, part = list(start), float("inf"), 0, 0
        while since_better < num:
            tried = np.repeat(np.array([now]), len(allowed), axis=0)
            tried[:, part] = allowed
            times = makespans(group, tried[:, list(part_of)])
            found = int(np.argmin(times))
            since_better += 1
            if times[found] < now_s * (1 - 1e-12):
                now_s, now[part], since_better = float(times[found]), int(allowed[found]), 1
            part = (part + 1) % num
        best_s = min(best_s, now_s)
    return best_s


def along(num_comms: int, cuts: Sequence[int]) -> list[int]:
    """The parts of a stream that is cut there."""
    return [sum(j >= cut for cut in cuts) for j in range(num_comms)]


def row_of(group: MeasuredGroup) -> dict[str, float]:
    """One group."""
    num, best_s = group.num_comms, group.oracle()[1]
    alike = makespans(group, np.repeat(EVERY[:, None], num, axis=1))
    one = int(np.argmin(alike))
    found = {"one setting": float(alike[one])}
    pairs = np.array([(a, b) for a in LATTICE for b in LATTICE])
    two_s = float("inf")
    for cut in range(1, num):
        parts = along(num, (cut,))
        best = pairs[np.argsort(makespans(group, pairs[:, parts]))[:3]]
        two_s = min(two_s, searched(group, parts, [[one, one], *best.tolist()], EVERY))
    three_s = [searched(group, along(num, cuts), [[one] * 3], EVERY) for cuts in combinations(range(1, num), 2)]
    found["two"], found["three"] = two_s, min(two_s, *three_s)
    kinds: dict[object, list[int]] = {}
    for place, config in enumerate(CONFIGS):
        kinds.setdefault((config.protocol, config.chunk_bytes), []).append(place)
    best_kinds = sorted(kinds.values(), key=lambda places: float(alike[places].min()))[:3]
    found["own channels"] = min(
        searched(group, range(num), [[places[int(np.argmin(alike[places]))]] * num], np.array(places))
        for places in best_kinds
    )
    return {words: makespan_s / best_s - 1 for words, makespan_s in found.items()}


def main() -> None:
    """Prints a row for each number of collectives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1001)
    parser.add_argument("--groups", type=count, default=20)
    parser.add_argument("--num-comms", type=numbers(int, 1), default=[4, 8])
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    for num_comms in chosen.num_comms:
        groups = [draw_group(chosen.seed, index, num_comms) for index in range(chosen.groups)]
        rows = [row_of(group) for group in groups]
        defaults = [group.exact(group.problem.default) for group in groups]
        jumps = [
            group._behind and told.makespan_s > EXPOSED * told.comp_s
            for group, told in zip(groups, defaults, strict=True)
        ]
        some = [row for row, jump in zip(rows, jumps, strict=True) if jump]
        for words, kept in (("all", rows), ("waiting and exposed", some)):
            means = {name: fmean(row[name] for row in kept) for name in rows[0]} if kept else {}
            if chosen.json:
                print(json.dumps({"num_comms": num_comms, "groups": words, "count": len(kept), **means}), flush=True)
            else:
                shown = ", ".join(f"{name} {100 * mean:.2f}" for name, mean in means.items())
                print(f"{num_comms} collectives, {words} ({len(kept)}): {shown}", flush=True)


if __name__ == "__main__":
    main()
