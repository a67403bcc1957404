"""The paired A/B verdict: is the tuned assignment faster than the untouched engine?

In each round every contender runs once, in a shuffled order, so that drift of the machine affects all alike; ratios are
taken within a round. The sequential test (`sequential`) decides whether they prove anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import median, quantiles
from types import MappingProxyType
from typing import Final

from lagom_overlap.tuners.sequential import Judgement, judged_pairs

DEFAULT_ARM: Final = "default"
TUNED_ARM: Final = "tuned"
SAME_ARM: Final = "default against itself"
"""The arm of the A/A phase before the rounds: pairs of the default, which measure the noise. Journals hold this
name."""
FIXED_PREFIX: Final = "fixed"
"""Baselines with this prefix compete for `best_fixed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """Baseline makespan over tuned makespan, pair by pair: above 1 the tuned assignment is faster.

    Quartiles are the inclusive ones (linear between order statistics). Without pairs, because the tuned assignment
    failed, all are 0: it is infinitely slow.
    """

    num_pairs: int
    median_ratio: float
    q25: float
    q75: float
    num_wins: int

    @classmethod
    def of(cls, baseline_s: Sequence[float], tuned_s: Sequence[float]) -> "PairedRatio":
        """The ratios of as many baseline as tuned makespans, at least two pairs, the tuned ones positive.

        Raises:
            ValueError: if the lengths differ, there are fewer than two pairs, or a tuned makespan is not positive.
        """
        if len(baseline_s) < 2 or min(tuned_s, default=0.0) <= 0:
            raise ValueError(f"need at least two pairs of positive makespans, got {baseline_s} and {tuned_s}")
        ratios = [base / tuned for base, tuned in zip(baseline_s, tuned_s, strict=True)]
        q25, _, q75 = quantiles(ratios, n=4, method="inclusive")
        return cls(
            num_pairs=len(ratios),
            median_ratio=median(ratios),
            q25=q25,
            q75=q75,
            num_wins=sum(ratio > 1 for ratio in ratios),
        )


NO_PAIRS: Final = PairedRatio(num_pairs=0, median_ratio=0.0, q25=0.0, q75=0.0, num_wins=0)
"""The tuned assignment failed in the verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of the rounds.

    `over_default` compares with the untouched default, `over_baselines` with every other contender by name.
    `best_fixed` is the name of the fixed setting with the lowest median, if any ran. `makespans_s[arm]` lists the
    iteration's makespan (sum over groups of count x makespan, or the whole step where that was timed) per round.
    `judgement` is the sequential test's, None where the tuned assignment failed; `adopted` says that the test found
    tuned faster, and that it differs from the default. `failures` gives the reason of each contender that failed: it
    has no ratio, its makespans end where it failed, and a tuned assignment that failed is not adopted.
    """

    over_default: PairedRatio
    over_baselines: Mapping[str, PairedRatio]
    best_fixed: str | None
    adopted: bool
    makespans_s: Mapping[str, tuple[float, ...]]
    judgement: Judgement | None = None
    failures: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def judge(
    makespans_s: Mapping[str, tuple[float, ...]],
    *,
    tuned_differs: bool,
    failures: Mapping[str, str],
    same_s: Sequence[tuple[float, float]] = (),
    most_pairs: int | None = None,
) -> Verdict:
    """The verdict over the rounds' makespans by contender; those in `failures` are out of the comparison.

    `same_s` are the pairs of the A/A phase, `most_pairs` as in `judged_pairs`.
    """
    tuned_failed = TUNED_ARM in failures
    tuned_s = makespans_s[TUNED_ARM]
    ratios = {
        arm: NO_PAIRS if tuned_failed else PairedRatio.of(times, tuned_s)
        for arm, times in makespans_s.items()
        if arm != TUNED_ARM and arm not in failures
    }
    judgement = (
        None if tuned_failed else judged_pairs(makespans_s[DEFAULT_ARM], tuned_s, same_s=same_s, most_pairs=most_pairs)
    )
    over_default = ratios.pop(DEFAULT_ARM)
    fixed = {arm: median(makespans_s[arm]) for arm in ratios if arm.startswith(FIXED_PREFIX) and makespans_s[arm]}
    return Verdict(
        over_default=over_default,
        over_baselines=ratios,
        best_fixed=min(fixed, key=lambda arm: (fixed[arm], arm)) if fixed else None,
        judgement=judgement,
        adopted=tuned_differs and judgement is not None and judgement.is_faster,
        makespans_s=dict(makespans_s),
        failures=dict(failures),
    )


CONFIDENCE: Final = 0.95
"""The customary level; nothing is adopted by this interval (see `sequential`)."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Median ratio of a baseline's time to an arm's (above 1: the arm is faster) and its interval; inf if unknown.

    The interval knows no distribution: it lies between two order statistics of the ratios; the binomial distribution of
    a fair coin gives the probability that the true median lies outside (Conover, Practical Nonparametric Statistics,
    section 3.2). It assumes independent rounds; a load that changes slowly makes it too narrow.
    """

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, or `not separable`."""
        if self.low > 1:
            return "faster"
        return "slower" if self.high < 1 else "not separable"

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}), {self.verdict}"


def compared(baseline_s: Sequence[float], arm_s: Sequence[float], *, confidence: float = CONFIDENCE) -> Comparison:
    """The comparison of paired times, at least one pair; with too few for the confidence the interval is unbounded."""
    ratios = sorted(base / arm for base, arm in zip(baseline_s, arm_s, strict=True))
    rank = _rank(len(ratios), confidence)
    low, high = (ratios[rank - 1], ratios[-rank]) if rank else (0.0, float("inf"))
    return Comparison(median(ratios), low, high)


def _rank(num_pairs: int, confidence: float) -> int:
    """The largest k for which the k-th smallest and k-th largest ratio enclose the median; 0 if there is none."""
    outside, rank = 0.0, 0
    for below in range(num_pairs // 2):
        outside += 2 * comb(num_pairs, below) / 2**num_pairs
        if outside > 1 - confidence:
            break
        rank = below + 1
    return rank
