"""Each line judged over what the paper does not say: sequence length, precision, kernels, links, NCCL's release.

A line counts as "not" only if it holds nowhere in the sweep. Fig. 8 is cheap and tried at every combination; Fig. 7,
whose searches take a minute, at each deviation alone. Under `paper_scale`, fitted to the paper's range, a line that
holds is built in all the same.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

from lagom_overlap.cost import Collectives
from lagom_overlap.papers.reproduce.figure7 import cases
from lagom_overlap.papers.reproduce.figure7 import lines as lines_of_cases
from lagom_overlap.papers.reproduce.figure8 import figure8
from lagom_overlap.papers.reproduce.ground import ASSUMED, Assumed
from lagom_overlap.papers.reproduce.result import Line, ReproducedVerdict
from lagom_overlap.workload.precision import DType

AXES: Final[dict[str, dict[str, dict[str, object]]]] = {
    "sequence": {f"{length} tokens": {"seq_len": length} for length in (4096, 2048, 1024, 512)},
    "precision": {"bf16": {}, "fp32": {"precision": DType.FP32}},
    "kernels": {"full rate": {}, "half rate": {"kernels": 0.5}},
    "links": {"as stated": {}, "half": {"links": 0.5}},
    "NCCL": {"2.18.3": {}, "2.30.7": {"release": Collectives.NCCL}},
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Where a published line holds, under one profile: settings by verdict, and the one that comes closest."""

    figure: str
    profile: str
    what: str
    published: str
    tried: tuple[Setting, ...]
    reproduced: tuple[Setting, ...]
    direction: tuple[Setting, ...]
    closest: Setting
    ours: str
    gap: float | None

    @property
    def where(self) -> str:
        """The verdict in words, and where it holds."""
        num = len(self.tried)
        parts = [
            f"{word} in {len(places)} of {num}: {described(places, self.tried)}"
            for word, places in (("reproduced", self.reproduced), ("direction only", self.direction))
            if places
        ]
        return "; ".join(parts) or f"not reproduced in any of {num}"

    @property
    def needed(self) -> str:
        """The closest setting and what it still lacks; "" where the line is reproduced."""
        if self.reproduced:
            return ""
        lacks = "" if self.gap is None else f", {100 * abs(self.gap):.0f} % {'short' if self.gap < 0 else 'beyond'}"
        return f"closest: {deviations(self.closest)} ({self.ours}{lacks})"


def deviations(setting: Setting) -> str:
    """What a setting assumes that the figures do not."""
    pairs = zip(AXES, setting, FIRST, strict=True)
    return ", ".join(f"{axis} {value}" for axis, value, first in pairs if value != first) or "as assumed"


def described(held: Sequence[Setting], tried: Sequence[Setting]) -> str:
    """Settings by the values they have on each axis that matters: `"1024, 512 tokens; links half"`."""
    if set(held) == set(tried):
        return "all"
    words = []
    for place, (axis, values) in enumerate(AXES.items()):
        had = [value for value in values if any(setting[place] == value for setting in held)]
        could = [value for value in values if any(setting[place] == value for setting in tried)]
        if had != could:
            words.append(f"{axis} {' or '.join(had)}")
    return ", ".join(words) or "no value of one axis alone decides"


def regions(found: Iterable[tuple[Setting, Sequence[Line]]]) -> list[Region]:
    """The lines of all settings, gathered by line and profile."""
    by_line: dict[tuple[str, str, str], list[tuple[Setting, Line]]] = {}
    for setting, lines in found:
        for line in lines:
            by_line.setdefault((line.figure, line.profile, line.what), []).append((setting, line))
    result = []
    for (figure, profile, what), outcomes in by_line.items():
        of = {
            verdict: tuple(setting for setting, line in outcomes if line.verdict is verdict)
            for verdict in (ReproducedVerdict.REPRODUCED, ReproducedVerdict.DIRECTION)
        }
        closest, nearest = min(outcomes, key=_distance)
        result.append(
            Region(
                figure=figure,
                profile=profile,
                what=what,
                published=nearest.published,
                tried=tuple(setting for setting, _ in outcomes),
                reproduced=of[ReproducedVerdict.REPRODUCED],
                direction=of[ReproducedVerdict.DIRECTION],
                closest=closest,
                ours=nearest.ours,
                gap=nearest.gap,
            )
        )
    return result


def _distance(entry: tuple[Setting, Line]) -> tuple[int, float]:
    """The better verdict, then the smaller gap."""
    _, line = entry
    ranks = (ReproducedVerdict.REPRODUCED, ReproducedVerdict.DIRECTION)
    rank = ranks.index(line.verdict) if line.verdict in ranks else len(ranks)
    return rank, 0.0 if line.gap is None else abs(line.gap)


def swept(
    figure: str,
    profile: str,
    seed: int,
    settings: Sequence[Setting] | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[tuple[Setting, list[Line]]]:
    """The lines of `fig7` or `fig8` under each setting, as they come."""
    if settings is None:
        settings = everywhere() if figure == "fig8" else one_at_a_time()
    for number, setting in enumerate(settings, 1):
        note(f"{figure}, {profile}, {number} of {len(settings)}: {', '.join(setting)}")
        assumed = assumed_in(setting)
        if figure == "fig8":
            yield setting, figure8(profile, seed, assumed)[1]
        else:
            yield setting, lines_of_cases(cases(profile, seed, assumed=assumed))
