"""Each line judged over what the paper does not say: sequence, precision, kernels, links, NCCL's release.

A line counts as "not" only if it holds nowhere in the sweep. Figures 3, 5 and 8 are tried at every combination, Fig. 7
and the convergence, whose searches take longer, at each deviation alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Final

from lagom_overlap.cost import Collectives
from lagom_overlap.papers.reproduce.convergence import convergence
from lagom_overlap.papers.reproduce.figure3 import lines as lines_of_figure3
from lagom_overlap.papers.reproduce.figure5 import figure5
from lagom_overlap.papers.reproduce.figure7 import cases
from lagom_overlap.papers.reproduce.figure7 import lines as lines_of_cases
from lagom_overlap.papers.reproduce.figure8 import figure8
from lagom_overlap.papers.reproduce.ground import ASSUMED, Assumed
from lagom_overlap.papers.reproduce.judge import under_profile
from lagom_overlap.papers.reproduce.result import Line, Region, ReproducedVerdict
from lagom_overlap.workload.precision import DType

SWEPT: Final = ("fig3", "fig5", "fig7", "fig8", "convergence")
"""The chapters that can be judged so."""
AXES: Final[dict[str, dict[str, dict[str, object]]]] = {
    "sequence": {f"{length} tokens": {"seq_len": length} for length in (4096, 2048, 1024, 512)},
    "precision": {"bf16": {}, "fp32": {"precision": DType.FP32}},
    "kernels": {"full rate": {}, "half rate": {"kernels": 0.5}},
    "links": {"as stated": {}, "half": {"links": 0.5}},
    "NCCL": {"2.18.3": {}, "2.30.7": {"release": Collectives.NCCL}},
    "products": {"blocks anywhere": {}, "persistent": {"persistent": True}},
}
"""By axis, its values in words and what they change; the first is what every figure assumes."""

Setting = tuple[str, ...]
"""One value per axis, in words."""
FIRST: Final[Setting] = tuple(next(iter(values)) for values in AXES.values())


def everywhere() -> tuple[Setting, ...]:
    """Every combination."""
    return tuple(product(*AXES.values()))


def one_at_a_time() -> tuple[Setting, ...]:
    """What the figures assume, and each deviation alone."""
    assumptions = [FIRST]
    for place, values in enumerate(AXES.values()):
        assumptions += [(*FIRST[:place], value, *FIRST[place + 1 :]) for value in values if value != FIRST[place]]
    return tuple(assumptions)


def assumed_in(setting: Setting) -> Assumed:
    """What a setting assumes; the figures' own is `ASSUMED`, whose models are kept."""
    changes: dict[str, object] = {}
    for value, values in zip(setting, AXES.values(), strict=True):
        changes |= values[value]
    return ASSUMED if setting == FIRST else Assumed(**changes)  # type: ignore[arg-type]  # keyed by its fields


def deviations(setting: Setting) -> str:
    """What a setting assumes that the figures do not."""
    pairs = zip(AXES, setting, FIRST, strict=True)
    return ", ".join(f"{axis} {value}" for axis, value, first in pairs if value != first) or "as assumed"


def described(settings: Sequence[Setting], tried: Sequence[Setting]) -> str:
    """How many settings, and their values on each axis that matters: `"3 of 64 (links half)"`."""
    if set(settings) == set(tried):
        return f"all {len(tried)}"
    words = []
    for place, (axis, values) in enumerate(AXES.items()):
        had = [value for value in values if any(setting[place] == value for setting in settings)]
        could = [value for value in values if any(setting[place] == value for setting in tried)]
        if had != could:
            words.append(f"{axis} {' or '.join(had)}")
    return f"{len(settings)} of {len(tried)} ({', '.join(words) or 'no value of one axis alone decides'})"


def regions(settings: Iterable[tuple[Setting, Sequence[Line]]]) -> list[Region]:
    """The lines of all settings, gathered by line and profile."""
    by_line: dict[tuple[str, str, str], list[tuple[Setting, Line]]] = {}
    for setting, lines in settings:
        for line in lines:
            by_line.setdefault((line.figure, line.profile, line.what), []).append((setting, line))
    return [_region(judged) for judged in by_line.values()]


def _region(judged: Sequence[tuple[Setting, Line]]) -> Region:
    """One line under every setting that was tried."""
    tried = [setting for setting, _ in judged]
    parts = []
    for verdict in ReproducedVerdict:
        settings = [setting for setting, line in judged if line.verdict is verdict]
        if settings and verdict is not ReproducedVerdict.NOT:
            parts.append(f"{verdict}: {described(settings, tried)}")
    setting, line = min(judged, key=_distance)
    holds = line.verdict in (ReproducedVerdict.REPRODUCED, ReproducedVerdict.BUILT_IN)
    gap = "" if line.gap is None else f", {100 * abs(line.gap):.0f} % {'short' if line.gap < 0 else 'beyond'}"
    return Region(
        figure=line.figure,
        profile=line.profile,
        what=line.what,
        published=line.published,
        best=line.verdict,
        where="; ".join(parts) or f"not reproduced in any of {len(tried)}",
        needed="" if holds else f"closest: {deviations(setting)} ({line.ours}{gap})",
    )


def _distance(entry: tuple[Setting, Line]) -> tuple[int, float]:
    """The better verdict, then the smaller gap."""
    _, line = entry
    return list(ReproducedVerdict).index(line.verdict), 0.0 if line.gap is None else abs(line.gap)


def _lines_of(figure: str, profile: str, seed: int, assumed: Assumed) -> list[Line]:
    match figure:
        case "fig3":
            return lines_of_figure3(profile, assumed)
        case "fig5":
            return figure5(profile, assumed)[1]
        case "fig7":
            return lines_of_cases(cases(profile, seed, assumed=assumed))
        case "fig8":
            return figure8(profile, seed, assumed)[1]
        case _:
            return convergence(profile, seed, assumed)[1]


def swept(
    figure: str,
    profile: str,
    seed: int,
    settings: Sequence[Setting] | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Setting, list[Line]]]:
    """The lines of one of `SWEPT` under each setting, as they come."""
    if settings is None:
        settings = one_at_a_time() if figure in ("fig7", "convergence") else everywhere()
    for number, setting in enumerate(settings, 1):
        note(f"{figure}, {profile}, {number} of {len(settings)}: {', '.join(setting)}")
        yield setting, under_profile(_lines_of(figure, profile, seed, assumed_in(setting)), profile)
