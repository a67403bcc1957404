"""Fig. 8c (section 4.4): how many iterations the searches take, and how that grows with the number of collectives.

Convergence is judged where the best was reached, within 0.5 % of what a search ends with: neither paper says when it
stops counting, and AutoCCL's own code spends fixed budgets (20 samples and 50 steps per collective, all collectives of
a group at once) that have nothing to do with it. Each search has its own budget here.

Algorithms 1 and 2 as printed (`tuners/lagom_printed.py`) are run on both patterns as well.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from lagom_overlap.cost import ContentionModel
from lagom_overlap.papers.reproduce.figure8 import patterns
from lagom_overlap.papers.reproduce.ground import ASSUMED, Assumed, Searched, model_of, problems_of, search
from lagom_overlap.papers.reproduce.judge import judge_number
from lagom_overlap.papers.reproduce.result import Curve, Line, ReproducedVerdict
from lagom_overlap.tuners.lagom_printed import PrintedEnd, printed
from lagom_overlap.units import MS
from lagom_overlap.workload import OverlapGroup

COUNTS: Final = (1, 2, 4, 8)
"""Collectives of a group, doubled: whether iterations grow with their number. Chosen."""
TUNERS: Final = {"autoccl": "AutoCCL", "lagom": "Lagom"}
PUBLISHED: Final = {"autoccl": 16, "lagom": 33}
WITHIN: Final = 1.005
"""Of the best at the end: a search has arrived. Chosen."""
CLOSE: Final = 0.15
"""How near to a published number of iterations ours must come."""
_TAKEN: Final = "nothing of the numbers"


def reached(best_s: tuple[float, ...]) -> int:
    """The measurement after which the best is within 0.5 % of the last."""
    return next(place + 1 for place, value in enumerate(best_s) if value <= WITHIN * best_s[-1])


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


def run_printed(group: OverlapGroup, model: ContentionModel) -> tuple[PrintedEnd, int]:
    """Algorithms 1 and 2 as printed on a group, and after how many measurements they ended or stopped."""
    backend, (problem,) = problems_of((group,), model)
    run, num = printed(problem), 0
    try:
        probe = next(run)
        while True:
            num += 1
            probe = run.send(backend.measure(problem.group, probe.assignment))
    except StopIteration as end:
        end_of_search: PrintedEnd = end.value
        return end_of_search, num


def _searched_lines(profile: str, searches: Mapping[str, Searched]) -> list[Line]:
    line = partial(Line, figure="convergence", profile=profile, taken=_TAKEN)
    why = {
        "autoccl": "The descent is near its end after its first steps; its budget runs on. How many of AutoCCL's"
        " iterations the paper counts it does not say.",
        "lagom": "A property of step size and stopping rule, not of the model: the climb takes the smallest joint step"
        " and stops when communication is hidden.",
    }
    num = {name: reached(searched.best_s) for name, searched in searches.items()}
    lines = [
        line(
            what=f"{label}: iterations to converge, two collectives",
            published=str(PUBLISHED[name]),
            ours=f"best reached after {num[name]} (search of {searches[name].num_measurements})",
            verdict=ReproducedVerdict.REPRODUCED
            if abs(num[name] / PUBLISHED[name] - 1) <= CLOSE
            else ReproducedVerdict.NOT,
            why=why[name],
        )
        for name, label in TUNERS.items()
    ]
    spent = {name: searched.num_measurements for name, searched in searches.items()}
    ratio = spent["lagom"] / spent["autoccl"]
    lines.append(
        line(
            what="Lagom needs about twice AutoCCL's iterations",
            published="2.06",
            ours=f"{ratio:.2f}: {spent['lagom']} measurements against {spent['autoccl']}",
            verdict=judge_number(ratio, PUBLISHED["lagom"] / PUBLISHED["autoccl"]),
            why="Of whole searches, each with its own budget and stopping rule.",
        )
    )
    return lines


def _counts_lines(profile: str, counts: Mapping[str, tuple[int, ...]]) -> list[Line]:
    per_comm = [(count - 2) / n for count, n in zip(counts["lagom"], COUNTS, strict=True)]
    is_linear = max(per_comm) <= 2 * max(per_comm[0], 1.0)
    words = {name: ", ".join(f"{n}: {c}" for n, c in zip(COUNTS, counts[name], strict=True)) for name in counts}
    return [
        Line(
            figure="convergence",
            profile=profile,
            what="Lagom's iterations grow linearly with the number of collectives",
            published="linear",
            ours=f"{words['lagom']} (AutoCCL {words['autoccl']})",
            verdict=ReproducedVerdict.REPRODUCED if is_linear else ReproducedVerdict.NOT,
            why="Each collective climbs its own ladder at most once; hidden communication ends all of them at once."
            " AutoCCL's are tuned at the same time, each with its own budget, so its number does not grow.",
            taken=_TAKEN,
        )
    ]


def _printed_lines(profile: str, model: ContentionModel, assumed: Assumed) -> list[Line]:
    lines = []
    for number, group in enumerate(patterns(assumed), start=1):
        end, num = run_printed(group, model)
        ended = "ends" if end.stopped is None else f"does not end: {end.stopped}"
        lines.append(
            Line(
                figure="convergence",
                profile=profile,
                what=f"Algorithms 1 and 2 as printed, pattern {number}",
                published="finds the optimal configuration",
                ours=f"{ended} after {num} measurements, with its input unchanged",
                verdict=ReproducedVerdict.NOT,
                why="No line replaces s_j: a collective that is done at its first probe returns what was given, and the"
                " printed learning rate is negative where communication improves.",
                taken="the algorithms",
            )
        )
    return lines


def convergence(profile: str, seed: int, assumed: Assumed = ASSUMED) -> tuple[list[Curve], list[Line]]:
    """Best makespan by measurement in pattern 2, measurements by number of collectives, and the paper's sentences."""
    model = model_of("a40_nvlink", profile, 1, assumed)
    second = patterns(assumed)[1]
    searches = {name: search(name, (second,), model, seed) for name in TUNERS}
    counts = {
        name: tuple(search(name, (_widened(second, n),), model, seed).num_measurements for n in COUNTS)
        for name in TUNERS
    }
    curves = [
        Curve(
            name=label,
            profile=profile,
            kind="8c",
            x=tuple(float(n + 1) for n in range(len(searches[name].best_s))),
            y=tuple(value / second.count / MS for value in searches[name].best_s),
        )
        for name, label in TUNERS.items()
    ]
    curves += [
        Curve(
            name=f"{label}: measurements",
            profile=profile,
            kind="linear",
            x=tuple(float(n) for n in COUNTS),
            y=tuple(float(n) for n in counts[name]),
        )
        for name, label in TUNERS.items()
    ]
    return curves, [
        *_searched_lines(profile, searches),
        *_counts_lines(profile, counts),
        *_printed_lines(profile, model, assumed),
    ]
