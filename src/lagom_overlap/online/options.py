"""The options of online tuning and their defaults."""

import os
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Final

from lagom_overlap.tuners.problem import MAX_PAIRS, MIN_PAIRS, most_verdict_steps
from lagom_overlap.tuners.registry import DEFAULT, OURS

DISABLE_VARIABLE: Final = "LAGOM_DISABLE"
LEAST_WINDOW: Final = 4
"""The shortest window: one step to settle, two measured ones for a median, and one while the reports travel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineOptions:
    """How to tune a running job; equal on all ranks, rank 0's count where they differ.

    `window_steps` is the length of a measuring window: its first step warms up, and its last one is not measured
    because the ranks' reports are under way. `max_slowdown` abandons a trial after one measured step that took that
    many times the default. `max_steps` and `max_seconds` bound the search and its verdict together, for each tuner; the
    verdict ends as soon as the sequential test has decided, after at most `num_pairs` rounds. `compare` names tuners
    that search after `tuner`, unguarded, and whose results run in the verdict's rounds; only `tuner`'s may be adopted.
    `watch_steps` is the length of a window once the job is settled (0: stop for good); where steps are short it is up
    to four times that, so that agreement takes a small part of them. A settled job is tuned again, at most `max_rearms`
    times, if its steps take `drift_ratio` times as long for `drift_steps` steps (more if longer phases have ended by
    themselves, see `watcher`), or if its calls differ in `drift_windows` measured windows in a row.
    Checks against the default cover saved settings at the start, the settings left by the last allowed search, and any
    settings later. The later ones take at most `check_share` of the settled steps so far; the check at the start and
    the one after the last search do not count towards that share (0: no checks, saved settings are trusted).
    Without `searches` nothing is searched: saved settings are judged against the default by the rule of a verdict, or
    trusted where `check_share` is 0, and if they are not of this job, nothing is set.
    `job_steps` is about how many steps the job makes from its start on (0: unknown, as in a short job): in a long one
    `ours` searches on while the expected gain in the steps left pays for the measurements, within `max_steps`.
    `timeout_s` is the longest time that any rank waits for another one because of us. `sm_carveouts` are numbers of SMs
    that the computation may leave free, one for the whole step; the tuner must search them (`both_sides`).
    `new_algorithms` also tries algorithms that NCCL has not used on a communicator yet: their buffers stay allocated
    (`routes.connections`).
    """

    tuner: str = OURS
    tuner_options: dict[str, bool | int | float | str] = field(default_factory=dict)
    compare: tuple[str, ...] = ()
    seed: int = 0
    window_steps: int = 5
    max_slowdown: float = 2.0
    max_steps: int = 1000
    max_seconds: float = 3600.0
    job_steps: int = 0
    num_pairs: int = 25
    deterministic: bool = False
    watch_steps: int = 25
    drift_ratio: float = 1.08
    drift_steps: int = 60
    drift_windows: int = 3
    max_rearms: int = 2
    check_share: float = 0.005
    timeout_s: float = 60.0
    journal: Path | None = None
    sm_carveouts: tuple[int, ...] = ()
    new_algorithms: bool = False
    searches: bool = True

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is {getattr(self, name)}, must be {allowed}"
            for name, allowed, is_right in (
                (
                    "compare",
                    f"different tuners other than {self.tuner!r} and {DEFAULT!r}, which run anyway",
                    len({self.tuner, DEFAULT, *self.compare}) == 2 + len(self.compare) - (self.tuner == DEFAULT),
                ),
                ("window_steps", f"at least {LEAST_WINDOW}", self.window_steps >= LEAST_WINDOW),
                ("max_slowdown", "above 1", self.max_slowdown > 1),
                ("max_steps", "at least 0", self.max_steps >= 0),
                ("max_seconds", "at least 0", self.max_seconds >= 0),
                ("job_steps", "at least 0", self.job_steps >= 0),
                ("num_pairs", f"from {MIN_PAIRS} to {MAX_PAIRS}", MIN_PAIRS <= self.num_pairs <= MAX_PAIRS),
                (
                    "watch_steps",
                    f"0 or at least {LEAST_WINDOW}",
                    self.watch_steps == 0 or self.watch_steps >= LEAST_WINDOW,
                ),
                ("drift_ratio", "above 1", self.drift_ratio > 1),
                ("drift_steps", "at least 1", self.drift_steps >= 1),
                ("drift_windows", "at least 1", self.drift_windows >= 1),
                ("max_rearms", "at least 0", self.max_rearms >= 0),
                ("check_share", "from 0 to 0.5", 0 <= self.check_share <= 0.5),
                ("timeout_s", "positive and finite", isfinite(self.timeout_s) and self.timeout_s > 0),
                (
                    "sm_carveouts",
                    "increasing and not negative",
                    list(self.sm_carveouts) == sorted(set(self.sm_carveouts))
                    and min(self.sm_carveouts, default=0) >= 0,
                ),
            )
            if not is_right
        ]
        if wrong:
            raise ValueError("; ".join(wrong))

    @property
    def most_steps(self) -> int:
        """Steps of all searches and the verdict together."""
        return self.max_steps * (1 + len(self.compare))

    @property
    def most_seconds(self) -> float:
        """The same in time."""
        return self.max_seconds * (1 + len(self.compare))

    @property
    def budget_warning(self) -> str:
        """Why nothing could be adopted: `max_steps` holds no whole verdict; "" where it does, or no search is wanted.

        The least that is known before the job's groups are: default against tuned, in windows.
        """
        verdict = most_verdict_steps(self.num_pairs) * self.window_steps
        if not 0 < self.max_steps < verdict:
            return ""
        return (
            f"max_steps is {self.max_steps}, but the verdict alone may take {verdict} steps ({self.num_pairs} pairs of "
            f"{self.window_steps}-step windows): nothing will be tuned; allow max_steps of {verdict} and the search's "
            "own, or fewer num_pairs"
        )


def is_disabled() -> bool:
    """Whether the environment switches everything off: `LAGOM_DISABLE` set to anything but nothing or 0."""
    return os.environ.get(DISABLE_VARIABLE, "") not in ("", "0")
