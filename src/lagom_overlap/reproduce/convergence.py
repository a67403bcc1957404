"""Fig. 8c (section 4.4): how many iterations the searches take, and how that grows with the number of collectives.

Departure: AutoCCL's own code spends fixed budgets (20 samples and 50 steps per collective, all collectives of a group
at once); the paper's 16 iterations are fewer than it takes by its defaults.
"""

from dataclasses import replace
from functools import partial
from typing import Final

from lagom_overlap.reproduce.figure8 import patterns
from lagom_overlap.reproduce.ground import model_of, search
from lagom_overlap.reproduce.judge import judge_number
from lagom_overlap.results.reproduce import Curve, Line, ReproducedVerdict
from lagom_overlap.units import MS
from lagom_overlap.workload import OverlapGroup

COUNTS: Final = (1, 2, 4, 8)


def _reached(best_s: tuple[float, ...]) -> int:
    """The measurement after which the best is within 0.5 % of the last."""
    return next(place + 1 for place, value in enumerate(best_s) if value <= 1.005 * best_s[-1])


def _widened(group: OverlapGroup, count: int) -> OverlapGroup:
    """The group's computations repeated during `count` of its collectives."""
    times = max(1, count // len(group.comms)) if count > 1 else 1
    comms = [
        replace(comm, name=f"{comm.name}.{n}", deps=())
        for n in range(times)
        for comm in (group.comms if count > 1 else group.comms[:1])
    ]
    computations = [replace(op, name=f"{op.name}.{n}", deps=()) for n in range(times) for op in group.computations]
    return OverlapGroup(name=f"n{count}", computations=tuple(computations), comms=tuple(comms))


def convergence(profile: str, seed: int) -> tuple[list[Curve], list[Line]]:
    """Best makespan by measurement in pattern 2, measurements by number of collectives, and the paper's sentences."""
    model = model_of("a40_nvlink", profile, 1)
    second = patterns()[1]
    found = {name: search(name, (second,), model, seed) for name in ("autoccl", "lagom")}
    curves = [
        Curve(
            name=label,
            profile=profile,
            kind="8c",
            x=tuple(float(n + 1) for n in range(len(found[name].best_s))),
            y=tuple(value / second.count / MS for value in found[name].best_s),
        )
        for name, label in (("autoccl", "AutoCCL"), ("lagom", "Lagom"))
    ]
    counts = [search("lagom", (_widened(second, n),), model, seed).num_measurements for n in COUNTS]
    curves.append(
        Curve(
            name="Lagom's measurements by collectives",
            profile=profile,
            kind="linear",
            x=tuple(float(n) for n in COUNTS),
            y=tuple(float(n) for n in counts),
        )
    )
    per_comm = [(count - 2) / n for count, n in zip(counts, COUNTS, strict=True)]
    linear = max(per_comm) <= 2 * max(per_comm[0], 1.0)
    taken = "nothing of the numbers; the ladder's rungs go through the pairs that the paper reports"
    line = partial(Line, figure="convergence", profile=profile, taken=taken)
    lines = []
    for name, label, published in (("autoccl", "AutoCCL", 16), ("lagom", "Lagom", 33)):
        ours = found[name].num_measurements
        lines.append(
            line(
                what=f"{label}: iterations to converge, two collectives",
                published=str(published),
                ours=f"{ours} (best within 0.5 % after {_reached(found[name].best_s)})",
                verdict=ReproducedVerdict.REPRODUCED if abs(ours / published - 1) <= 0.15 else ReproducedVerdict.NOT,
                why="A property of step size and stopping rule, not of the model: our ladder climbs by doublings"
                " and stops when communication is hidden; 33 needs small additive steps."
                if name == "lagom"
                else "Our AutoCCL spends its code's budgets; 16 is what is left if only one descent counts.",
            )
        )
    ratio = found["lagom"].num_measurements / found["autoccl"].num_measurements
    lines.append(
        line(
            what="Lagom needs about twice AutoCCL's iterations",
            published="2.06",
            ours=f"{ratio:.2f}",
            verdict=judge_number(ratio, 33 / 16),
            why="Follows from the two numbers above.",
        )
    )
    lines.append(
        line(
            what="Lagom's iterations grow linearly with the number of collectives",
            published="linear",
            ours=", ".join(f"{n}: {count}" for n, count in zip(COUNTS, counts, strict=True)),
            verdict=ReproducedVerdict.REPRODUCED if linear else ReproducedVerdict.NOT,
            why="Each collective climbs its own ladder at most once; hidden communication ends all of them at once.",
        )
    )
    return curves, lines
