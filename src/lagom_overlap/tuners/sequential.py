"""Whether one arm is faster than another: a sequential test with a stated error rate, for every verdict of the package.

Two arms run in blocks side by side, a pair at a time, in an order drawn anew for every pair. If the arms do not differ,
the two times of a pair are what they are, and a fair coin decides which of them is called the challenger's. So the sign
of x = ln(incumbent / challenger) is a fair coin, given its size and all that came before: by the design of the
experiment (Fisher, The Design of Experiments, 1935, ch. III), whatever the noise is: heavy tails, drift, bursts,
periods, dependence from pair to pair. We bet on the coin. With a scale s_i that is known before pair i,

    W_n = sum_k w_k prod_{i <= n} (1 + B tanh(l_k (x_i - c) / s_i))

is a fair game under "the challenger is faster by the factor e^c", and a losing one if it is faster by less. By Ville's
inequality (Etude critique de la notion de collectif, 1939) a fair game that began with 1 ever reaches 1 / ALPHA with
probability ALPHA at most: the test may be looked at after every pair and stopped at any of them. The form is that of
Waudby-Smith and Ramdas (J. R. Stat. Soc. B 86, 2024, betting), for signs and symmetric noise as in Ramdas, Ruf, Larsson
and Koolen (arXiv 2009.03167); tanh bounds what a single pair can win or lose, so an outlier is one pair and no more.
`low` and `high` are the factors c that the pairs rule out, one side each: a confidence sequence.

The scale is the job's own noise: an A/A phase first, in which both blocks run the incumbent, then the deviations of the
pairs from their median so far. Where it is wrong, the test only takes longer.

Times that repeat to the last bit are a formula's, no clock's, and have no noise to judge: `EXACT_PAIRS` decide then. A
difference below the least effect is none there either: no formula is that good.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, exp, inf, isfinite, log
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

ALPHA: Final = 0.01
"""Most false answers "faster", at any stopping time, where the challenger is not faster. The same for "slower"."""
MIN_EFFECT: Final = 0.005
"""The smallest gain that counts: below it nothing is adopted, and the test ends once the gain is surely less."""
EXACT_PAIRS: Final = 3
UNKNOWN_SCALE: Final = 0.01
"""Before anything was seen of the noise: steps of real jobs vary by a per cent."""
LEAST_SCALE: Final = 1e-6
_MOST_BET: Final = 0.999
_BETS: Final = np.array([0.2, 0.4, 0.8, 1.6, 6.4])
_WEIGHTS: Final = np.log([0.15, 0.15, 0.15, 0.15, 0.40])
"""Small bets for gains within the noise, a large one for those beyond it."""
LEAST_PAIRS: Final = ceil(log(1 / ALPHA) / log(1 + _MOST_BET))
"""With fewer pairs that are not exact nothing can be decided."""

Array = NDArray[np.float64]


class Decision(StrEnum):
    """How a test stands."""

    OPEN = "open"
    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the pairs say so far of a challenger against an incumbent.

    `ratio` is the median of incumbent over challenger, above 1 where the challenger is faster; outside `low` to `high`
    it is not, with an error of `alpha` a side (0 and infinity: nothing is ruled out). `noise` is the median distance of
    two blocks of one arm, as a share; None where no A/A phase ran. `min_effect` is the least gain that counts.
    """

    decision: Decision
    num_pairs: int
    ratio: float
    low: float
    high: float
    noise: float | None
    alpha: float
    min_effect: float

    @property
    def is_faster(self) -> bool:
        """Whether the challenger is to be adopted."""
        return self.decision is Decision.FASTER

    @property
    def largest_unseen(self) -> float:
        """The largest difference either way that the pairs do not rule out, as a share; infinite if any may be."""
        return inf if self.low <= 0 else max(self.high - 1, 1 / self.low - 1, 0.0)

    def sentence(self, *, steps_per_pair: int = 0) -> str:
        """The outcome for people, in terms of the challenger."""
        num = f"{self.num_pairs} pairs"
        if steps_per_pair:
            num += f" of {steps_per_pair} steps"
        noise = "" if self.noise is None else f", noise {self.noise:.2%}"
        limits = f"{self.low:.3f} to {'any' if not isfinite(self.high) else f'{self.high:.3f}'}"
        if self.decision in (Decision.FASTER, Decision.SLOWER):
            return f"{self.ratio:.3f}x ({limits}), {self.decision} in {num} at an error rate of {self.alpha:.0%}{noise}"
        if self.low == self.high:
            return f"{self.ratio:.4f}x: less than {self.min_effect:.1%} counts as no difference"
        if not isfinite(self.largest_unseen):
            if self.decision is Decision.NO_DIFFERENCE and self.ratio < 1:
                return f"{self.ratio:.3f}x; ended after {num}, since it could no longer be proved faster{noise}"
            need = f"; no decision takes less than {LEAST_PAIRS}" if self.num_pairs < LEAST_PAIRS else ""
            return f"{self.ratio:.3f}x, nothing can be told from {num}{noise}{need}"
        return f"{self.ratio:.3f}x ({limits}), neither faster nor slower beyond doubt in {num}{noise}"


def judged_pairs(
    incumbent_s: Sequence[float],
    challenger_s: Sequence[float],
    *,
    same_s: Sequence[tuple[float, float]] = (),
    most_pairs: int | None = None,
    alpha: float = ALPHA,
    min_effect: float = MIN_EFFECT,
) -> Judgement:
    """How the test stands after these pairs of block times.

    `same_s` are the pairs of the A/A phase. With `most_pairs` the test ends there, and before where "faster" is out of
    reach; without, it stands open until it is decided.

    Raises:
        ValueError: if there is no pair, or a time is not positive.
    """
    if not len(incumbent_s) or min(*incumbent_s, *challenger_s) <= 0:
        raise ValueError(f"need pairs of positive times, got {incumbent_s} and {challenger_s}")
    x = np.log(np.array(incumbent_s, float) / np.array(challenger_s, float))
    same = np.abs([log(first / second) for first, second in same_s if first > 0 and second > 0])
    ratio, noise = exp(median(x.tolist())), float(np.expm1(np.median(same))) if len(same) else None
    if is_exact(incumbent_s, challenger_s, same_s):
        return _exact(ratio, len(x), noise, alpha, min_effect)
    scale = scales(x[None], np.tile(same, (1, 1)))
    enough = log(1 / alpha)
    faster, slower = float(log_wealth(x[None], scale).max()), float(log_wealth(-x[None], scale).max())
    low, below = _limit(x, scale, enough), _limit(-x, scale, enough)
    high = 1 / below if below else inf
    decision = Decision.OPEN
    if len(x) < min(EXACT_PAIRS, most_pairs or EXACT_PAIRS):  # they may yet turn out to be exact
        pass
    elif slower >= enough:
        decision = Decision.SLOWER
    elif high - 1 < min_effect:
        decision = Decision.NO_DIFFERENCE
    elif faster >= enough and ratio - 1 >= min_effect:
        decision = Decision.FASTER
    elif most_pairs is not None:
        left = most_pairs - len(x)
        now = float(log_wealth(x[None], scale)[0, -1])
        if left <= 0 or (faster < enough and now + left * log(1 + _MOST_BET) < enough):
            decision = Decision.NO_DIFFERENCE
    return Judgement(
        decision=decision,
        num_pairs=len(x),
        ratio=ratio,
        low=low,
        high=high,
        noise=noise,
        alpha=alpha,
        min_effect=min_effect,
    )


def is_exact(
    incumbent_s: Sequence[float], challenger_s: Sequence[float], same_s: Sequence[tuple[float, float]]
) -> bool:
    """Whether every time repeats to the last bit: a formula's, not a clock's."""
    own = [*incumbent_s, *(time_s for pair in same_s for time_s in pair)]
    return len(incumbent_s) >= EXACT_PAIRS and len(set(own)) == 1 and len(set(challenger_s)) == 1


def _exact(ratio: float, num_pairs: int, noise: float | None, alpha: float, min_effect: float) -> Judgement:
    decision = Decision.NO_DIFFERENCE
    if abs(log(ratio)) > (1 - 1e-9) * log(1 + min_effect):  # the ratio is the exponential of a logarithm
        decision = Decision.FASTER if ratio > 1 else Decision.SLOWER
    return Judgement(
        decision=decision,
        num_pairs=num_pairs,
        ratio=ratio,
        low=ratio,
        high=ratio,
        noise=noise,
        alpha=alpha,
        min_effect=min_effect,
    )


def scales(x: Array, same: Array) -> Array:
    """The scale of each pair, by row, from what came before: sizes of A/A differences, deviations of earlier pairs."""
    seen, found = same, np.empty_like(x)
    for number in range(x.shape[1]):
        found[:, number] = np.median(seen, axis=1) if seen.shape[1] else UNKNOWN_SCALE
        if number:
            deviation = np.abs(x[:, number] - np.median(x[:, :number], axis=1))
            seen = np.concatenate([seen, deviation[:, None]], axis=1)
    return np.maximum(found, LEAST_SCALE)


def log_wealth(x: Array, scale: Array) -> Array:
    """The logarithm of W after each pair; rows are tests."""
    bets = _BETS[:, None, None] * (x / scale)
    parts = _WEIGHTS[:, None, None] + np.cumsum(np.log1p(_MOST_BET * np.tanh(bets)), axis=2)
    most: Array = parts.max(axis=0)
    wealth: Array = most + np.log(np.exp(parts - most).sum(axis=0))
    return wealth


def _limit(x: Array, scale: Array, enough: float) -> float:
    """The largest factor that "faster by more than that" holds for; 0 where it holds for none."""
    if log_wealth(x[None] + 20 * _reach(x), scale).max() < enough:
        return 0.0
    low, high = -20 * _reach(x), float(x.max())
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if log_wealth(x[None] - middle, scale).max() >= enough else (low, middle)
    return exp(low)


def _reach(x: Array) -> float:
    return float(np.abs(x).max()) + 1.0
