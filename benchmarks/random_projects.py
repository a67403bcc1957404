"""Writes random projects as PSPLIB `.sm` files, in the manner of its generator: data that no solver was developed on.

    python benchmarks/random_projects.py FOLDER --activities 120 --count 12 --seed 5
    python benchmarks/rcpsp.py FOLDER --seconds 30

After R. Kolisch, A. Sprecher, A. Drexl, "Characterization and generation of a general class of resource-constrained
project scheduling problems", Management Science 41 (1995) 1693-1703: durations and demands uniform in 1 .. 10, three
activities without predecessor and three without successor, at most three arcs at either end, none redundant; network
complexity (arcs per activity), resource factor (share of resources that an activity uses) and resource strength
(capacity between the largest demand, 0, and the peak of the earliest schedule, 1). The cells are PSPLIB's hard ones.
"""

import argparse
import sys
from itertools import cycle, islice, product
from pathlib import Path
from random import Random
from typing import Final

_COMPLEXITIES: Final = (1.5, 1.8, 2.1)
_FACTORS: Final = (0.5, 0.75, 1.0)
_STRENGTHS: Final = (0.1, 0.2, 0.3)
_NUM_RESOURCES: Final = 4
_NUM_ENDS: Final = 3
_MAX_ARCS: Final = 3
_RULE: Final = "*" * 72


class Network:
    """Arcs between real activities 1 .. n with the transitive closure, to keep redundant ones out."""

    def __init__(self, num: int) -> None:
        self.succs: list[set[int]] = [set() for _ in range(num + 1)]
        self.preds: list[set[int]] = [set() for _ in range(num + 1)]
        self._after: list[set[int]] = [set() for _ in range(num + 1)]
        self._before: list[set[int]] = [set() for _ in range(num + 1)]

    def takes(self, pred: int, succ: int) -> bool:
        """Adds the arc unless an end is full, or it or another one became redundant; whether it was added."""
        full = len(self.succs[pred]) >= _MAX_ARCS or len(self.preds[succ]) >= _MAX_ARCS
        if full or succ in self._after[pred]:
            return False
        before, after = self._before[pred] | {pred}, self._after[succ] | {succ}
        if any(self.succs[early] & after for early in before):
            return False
        self.succs[pred].add(succ)
        self.preds[succ].add(pred)
        for early in before:
            self._after[early] |= after
        for late in after:
            self._before[late] |= before
        return True


def network(random: Random, num: int, complexity: float) -> list[set[int]]:
    """Successors of activities 0 .. n + 1, the first and the last the dummies."""
    arcs = Network(num)
    first, last = range(1, _NUM_ENDS + 1), range(num - _NUM_ENDS + 1, num + 1)
    for activity in range(_NUM_ENDS + 1, num + 1):
        highest = min(activity, num - _NUM_ENDS + 1)
        while not arcs.takes(random.randrange(1, highest), activity):
            pass
    for activity in range(num - _NUM_ENDS, 0, -1):
        lowest = max(activity, _NUM_ENDS) + 1
        for _ in range(1000):
            if arcs.succs[activity] or arcs.takes(activity, random.randrange(lowest, num + 1)):
                break
    wanted = round(complexity * (num + 2))
    for _ in range(1000 * num):
        count = sum(map(len, arcs.succs)) + sum(not s for s in arcs.succs[1:]) + len(first)
        if count >= wanted:
            break
        pred, succ = sorted(random.sample(range(1, num + 1), 2))
        if pred not in last and succ not in first:
            arcs.takes(pred, succ)
    return [set(first), *(succs or {num + 1} for succs in arcs.succs[1:]), set()]


def demands(random: Random, num: int, factor: float) -> list[list[int]]:
    """Demands of real activities: each uses at least one resource, a share `factor` of all pairs is used."""
    used = {(activity, random.randrange(_NUM_RESOURCES)) for activity in range(num)}
    others = [pair for pair in product(range(num), range(_NUM_RESOURCES)) if pair not in used]
    random.shuffle(others)
    used.update(others[: max(0, round(factor * num * _NUM_RESOURCES) - num)])
    return [[random.randint(1, 10) if (a, r) in used else 0 for r in range(_NUM_RESOURCES)] for a in range(num)]


def capacities(succs: list[set[int]], durations: list[int], needs: list[list[int]], strength: float) -> list[int]:
    """From the largest demand (strength 0) to the peak of the schedule of earliest starts (strength 1)."""
    starts = [0] * len(succs)
    for activity, after in enumerate(succs):  # every arc goes to a higher number
        for succ in after:
            starts[succ] = max(starts[succ], starts[activity] + durations[activity])
    found = []
    for resource in range(_NUM_RESOURCES):
        least = max(row[resource] for row in needs)
        peak = max(
            sum(
                row[resource]
                for row, start, duration in zip(needs, starts, durations, strict=True)
                if start <= moment < start + duration
            )
            for moment in set(starts)
        )
        found.append(least + round(strength * (peak - least)))
    return found


def project(name: str, seed: int, num: int, cell: tuple[float, float, float]) -> str:
    """One project as the text of a `.sm` file; `cell` is its strength, factor and complexity."""
    strength, factor, complexity = cell
    random = Random(f"{name} {seed}")
    succs = network(random, num, complexity)
    durations = [0, *(random.randint(1, 10) for _ in range(num)), 0]
    none = [0] * _NUM_RESOURCES
    needs = [none, *demands(random, num, factor), none]
    limits = capacities(succs, durations, needs, strength)
    arcs = [
        f"{a + 1:4} 1 {len(after):4}  " + "".join(f"{s + 1:5}" for s in sorted(after)) for a, after in enumerate(succs)
    ]
    rows = [
        f"{a + 1:4} 1 {duration:4}  " + "".join(f"{need:5}" for need in row)
        for a, (duration, row) in enumerate(zip(durations, needs, strict=True))
    ]
    return "\n".join(
        [
            _RULE,
            f"random project {name}, seed {seed}, complexity {complexity}, factor {factor}, strength {strength}",
            f"jobs (incl. supersource/sink ):  {num + 2}",
            f"  - renewable                 :  {_NUM_RESOURCES}   R",
            "  - nonrenewable              :  0   N",
            "  - doubly constrained        :  0   D",
            *(_RULE, "PRECEDENCE RELATIONS:", "jobnr.    #modes  #successors   successors", *arcs),
            *(_RULE, "REQUESTS/DURATIONS:", "jobnr. mode duration  R 1  R 2  R 3  R 4", "-" * 72, *rows),
            *(_RULE, "RESOURCEAVAILABILITIES:", "  R 1  R 2  R 3  R 4", " ".join(map(str, limits)), _RULE, ""),
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="made if it does not exist")
    parser.add_argument("--activities", type=int, default=120)
    parser.add_argument("--count", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.activities < 10 or args.count < 1:
        parser.error("at least 10 activities and 1 project")
    args.folder.mkdir(parents=True, exist_ok=True)
    cells = list(product(_STRENGTHS, _FACTORS, _COMPLEXITIES))
    # Neighbours in the list differ in all three.
    order = cycle(cells[7 * i % len(cells)] for i in range(len(cells)))
    for number, cell in enumerate(islice(order, args.count), start=1):
        name = f"r{args.activities}_{number}"
        text = project(name, args.seed, args.activities, cell)
        (args.folder / f"{name}.sm").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
