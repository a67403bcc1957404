"""Whether one arm is faster than another: a sequential test with a stated error rate, used for every verdict.

Two arms run in pairs of blocks; the order is drawn at random for every pair. If the arms do not differ, the two times
of a pair would be the same in either order, and a fair coin decides which of them is called the challenger's. So given
its size and all earlier pairs, the sign of x = ln(incumbent / challenger) is a fair coin. That follows from the design
of the experiment (Fisher, The Design of Experiments, 1935, ch. III) under any noise: heavy tails, drift, bursts,
periods, dependence between pairs. We bet on the coin. With a scale s_i that is known before pair i,

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
from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil, exp, inf, isfinite, log
from statistics import median
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from lagom_overlap.units import format_percent

ALPHA: Final = 0.01
"""Most false answers "faster", at any stopping time, where the challenger is not faster. The same for "slower"."""
MIN_EFFECT: Final = 0.005
"""The smallest gain that counts: below it nothing is adopted, and the test ends once the gain is surely less."""
EXACT_PAIRS: Final = 3
"""Pairs whose times must all repeat to the last bit before they count as noise-free. Chosen: chance cannot explain
it."""
UNKNOWN_SCALE: Final = 0.01
"""The scale before any noise was observed: steps of real jobs vary by about one percent."""
LEAST_SCALE: Final = 1e-6
"""Keeps the division by the scale finite when earlier pairs are equal."""
_MOST_BET: Final = 0.999
"""B of the formula, below 1 so that one pair never loses the whole wealth."""
_BETS: Final = np.array([0.2, 0.4, 0.8, 1.6, 6.4])
"""l_k of the formula."""
_WEIGHTS: Final = np.log([0.15, 0.15, 0.15, 0.15, 0.40])
"""ln w_k: small bets for gains within the noise, a large one for gains beyond it. Any weights that sum to 1 are valid;
they only change how many pairs a decision takes."""


def least_pairs(alpha: float) -> int:
    """The fewest pairs that can decide, unless they are exact: with every bet won, wealth reaches 1 / alpha here."""
    return ceil(log(1 / alpha) / log(1 + _MOST_BET))


def pairs_of_large_bet(alpha: float) -> int:
    """The fewest pairs by which the large bet alone decides: those of a gain that is clear of the noise."""
    return ceil((log(1 / alpha) - float(_WEIGHTS.max())) / log(1 + _MOST_BET))


LEAST_PAIRS: Final = least_pairs(ALPHA)

Array = NDArray[np.float64]

NOISY: Final = 0.05
"""From this difference between equal runs on, people are told that the machine is noisy. Chosen: five times what
steps of real jobs vary by."""


class Decision(StrEnum):
    """How a test stands."""

    OPEN = "open"
    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The state of the test of a challenger against an incumbent.

    `ratio` is the median of incumbent over challenger, above 1 where the challenger is faster. The true factor lies
    between `low` and `high` with an error of at most `alpha` on each side (0 and infinity: nothing is ruled out).
    `noise` is the median difference between two blocks of the same arm, as a share; None if no A/A phase ran.
    `min_effect` is the smallest gain that counts.
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
        """The largest difference in either direction that the pairs do not rule out, as a share; may be infinite."""
        return inf if self.low <= 0 else max(self.high - 1, 1 / self.low - 1, 0.0)

    def sentence(self, *, steps_per_pair: int = 0) -> str:
        """The outcome for people, of the challenger: `"proven faster in 7 pairs: 1.240x (1.230 to 1.270)"`."""
        pairs = f"{self.num_pairs} pairs" + (f" of {steps_per_pair} steps" if steps_per_pair else "")
        limits = f"{self.low:.3f} to {'any' if not isfinite(self.high) else f'{self.high:.3f}'}"
        if self.decision in (Decision.FASTER, Decision.SLOWER):
            errs = f"error rate {format_percent(self.alpha, 0)}"
            return f"proven {self.decision} in {pairs}: {self.ratio:.3f}x ({limits}; {errs}){self._noise_words}"
        if self.low == self.high:
            return (
                f"no faster: {self.ratio:.4f}x, and less than {format_percent(self.min_effect)} counts as no difference"
            )
        if isfinite(self.largest_unseen):
            return f"not proven faster or slower in {pairs}: {self.ratio:.3f}x ({limits}){self._noise_words}"
        if self.decision is Decision.NO_DIFFERENCE and self.ratio < 1:
            ended = f", ended after {pairs} because no more could prove it"
            return f"not proven faster: {self.ratio:.3f}x{ended}{self._noise_words}"
        least = least_pairs(self.alpha)
        need = f" (a decision needs at least {least})" if self.num_pairs < least else ""
        return f"not proven faster or slower in {pairs}{need}: {self.ratio:.3f}x{self._noise_words}"

    @property
    def _noise_words(self) -> str:
        if self.noise is None:
            return ""
        if self.noise >= NOISY:
            return f"; the machine is noisy, equal runs differ by {format_percent(self.noise, 0)}"
        return f"; equal runs differ by {format_percent(self.noise, 2)}"


def judged_pairs(
    incumbent_s: Sequence[float],
    challenger_s: Sequence[float],
    *,
    same_s: Sequence[tuple[float, float]] = (),
    most_pairs: int | None = None,
    alpha: float = ALPHA,
    min_effect: float = MIN_EFFECT,
) -> Judgement:
    """The state of the test after these pairs of block times in seconds.

    `same_s` are the pairs of the A/A phase. With `most_pairs` the test ends there at the latest, and earlier once
    "faster" is out of reach; without, it stays open until it is decided.

    Raises:
        ValueError: if there is no pair, or a time is not positive.
    """
    if not len(incumbent_s) or min(*incumbent_s, *challenger_s) <= 0:
        raise ValueError(f"need pairs of positive times, got {incumbent_s} and {challenger_s}")
    x, same = _log_ratios(incumbent_s, challenger_s, same_s)
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


def proven_pairs(
    incumbent_s: Sequence[float],
    challenger_s: Sequence[float],
    most_pairs: int,
    *,
    same_s: Sequence[tuple[float, float]] = (),
    alpha: float = ALPHA,
) -> Judgement:
    """The same for a proof, which also has to say that the challenger is slower, or how far the arms are apart at most.

    So it does not end because "faster" is out of reach: before `most_pairs` only a decision ends it, or a difference
    that is bounded on both sides.

    Raises:
        ValueError: as `judged_pairs`.
    """
    is_last = len(incumbent_s) >= most_pairs
    most = most_pairs if is_last else None
    judgement = judged_pairs(incumbent_s, challenger_s, same_s=same_s, most_pairs=most, alpha=alpha)
    if judgement.decision is Decision.NO_DIFFERENCE and not (is_last or isfinite(judgement.largest_unseen)):
        return replace(judgement, decision=Decision.OPEN)
    return judgement


def more_pairs(
    incumbent_s: Sequence[float],
    challenger_s: Sequence[float],
    *,
    same_s: Sequence[tuple[float, float]] = (),
    alpha: float = ALPHA,
) -> int | None:
    """About how many pairs in all would decide if they went on like these; None where nothing grows towards that.

    An estimate, of no meaning for the error rate: the wealth of each bet grows by its mean so far with every pair, for
    one direction or the other.
    """
    x, same = _log_ratios(incumbent_s, challenger_s, same_s)
    scale = scales(x[None], np.tile(same, (1, 1)))[0, -1]  # what later pairs are measured by
    bets = _BETS[:, None] * (x / scale)
    needs = [
        (log(1 / alpha) - float(weight)) / float(rate)
        for sign in (1, -1)
        for weight, rate in zip(_WEIGHTS, np.log1p(_MOST_BET * np.tanh(sign * bets)).mean(axis=1), strict=True)
        if rate > 0
    ]
    return max(len(x), ceil(min(needs))) if needs else None


def _log_ratios(
    incumbent_s: Sequence[float], challenger_s: Sequence[float], same_s: Sequence[tuple[float, float]]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """How much faster the challenger is in each pair, and how far the default is from itself."""
    x = np.log(np.array(incumbent_s, float) / np.array(challenger_s, float))
    return x, np.abs([log(first / second) for first, second in same_s if first > 0 and second > 0])


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
    """The scale of each pair, by row, from earlier data only: A/A differences and deviations of earlier pairs."""
    sizes, result = same, np.empty_like(x)
    for number in range(x.shape[1]):
        result[:, number] = np.median(sizes, axis=1) if sizes.shape[1] else UNKNOWN_SCALE
        if number:
            deviation = np.abs(x[:, number] - np.median(x[:, :number], axis=1))
            sizes = np.concatenate([sizes, deviation[:, None]], axis=1)
    return np.maximum(result, LEAST_SCALE)


def log_wealth(x: Array, scale: Array) -> Array:
    """The logarithm of W after each pair; rows are tests."""
    bets = _BETS[:, None, None] * (x / scale)
    parts = _WEIGHTS[:, None, None] + np.cumsum(np.log1p(_MOST_BET * np.tanh(bets)), axis=2)
    most: Array = parts.max(axis=0)
    wealth: Array = most + np.log(np.exp(parts - most).sum(axis=0))
    return wealth


def _limit(x: Array, scale: Array, enough: float) -> float:
    """The largest factor c for which "faster by more than c" is proven; 0 if there is none. Found by bisection."""
    if log_wealth(x[None] + 20 * _reach(x), scale).max() < enough:
        return 0.0
    low, high = -20 * _reach(x), float(x.max())
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if log_wealth(x[None] - middle, scale).max() >= enough else (low, middle)
    return exp(low)


def _reach(x: Array) -> float:
    return float(np.abs(x).max()) + 1.0
