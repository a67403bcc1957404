"""Writes the plans of windows: numbers windows and settings, and includes what the ranks do not have yet.

Settings go by size classes; how wide they must be shows in the windows.
"""

from typing import Final

from lagom_overlap.collective.sites import RoleCycle, SiteSetting
from lagom_overlap.online.ranks.messages import SETTLED, UNLIKE, SwitchState, WindowPlan

MIN_VARIED: Final = 3
"""Windows whose calls had other sizes before sizes are grouped into classes: fewer may be evaluations."""
PROBATION_STEPS: Final = 3
"""Steps of a new setting's first window: one to settle, one measured, one while the reports travel."""


class Plans:
    """The plans of one job so far; `steps_apart` and `size_octaves` as in `WindowPlan`, `cycles` go with the first.

    `settings` are those of the next plan, `adopted` what a verdict of this job speaks for.
    """

    def __init__(self, *, steps_apart: int, cycles: tuple[RoleCycle, ...], size_octaves: int) -> None:
        self._steps_apart: Final = steps_apart
        self._cycles: Final = cycles
        self.size_octaves = size_octaves
        self.last: WindowPlan | None = None
        self.state = SwitchState.RECORD
        self.reason = ""
        self.settings: tuple[SiteSetting, ...] = ()
        self.adopted: tuple[SiteSetting, ...] = ()
        self.is_overturned = False
        self._epoch = 0
        self._journal: list[str] = []
        self._journal_is_new = False

    @property
    def next_window(self) -> int:
        """The number of the window that the next plan is for."""
        return 0 if self.last is None else self.last.window + 1

    def set(self, settings: tuple[SiteSetting, ...]) -> None:
        """Makes the settings those of the next plan."""
        if settings != self.settings:
            self.settings, self._epoch = settings, self._epoch + 1

    def begin_journal(self, lines: list[str]) -> None:
        """The next plan has the ranks begin their journals anew, with these lines."""
        self._journal, self._journal_is_new = lines, True

    def add_to_journal(self, line: str) -> None:
        """The next plan has the ranks add a line to their journals."""
        self._journal.append(line)

    def give(self, state: SwitchState, reason: str, num_steps: int, first_measured: int) -> WindowPlan:
        """The next plan; without a measured step where `first_measured` is `num_steps`."""
        self.state, self.reason = state, reason
        is_new = self.last is None or self.last.epoch != self._epoch
        self.last = WindowPlan(
            window=self.next_window,
            state=state,
            reason=reason,
            num_steps=num_steps,
            first_measured=first_measured,
            steps_apart=self._steps_apart,
            epoch=self._epoch,
            settings=self.settings if is_new else (),
            cycles=self._cycles if self.last is None else (),
            size_octaves=self.size_octaves,
            is_adopted=bool(self.adopted) and state in SETTLED and self.settings == self.adopted,
            is_overturned=self.is_overturned,
            journal=tuple(self._journal),
            journal_is_new=self._journal_is_new,
        )
        self._journal, self._journal_is_new, self.is_overturned = [], False, False
        return self.last

    def same_again(self, reason: str = "") -> WindowPlan:
        """The last plan once more, for this reason or its own."""
        assert self.last is not None, "nothing to repeat"
        return self.give(self.state, reason or self.reason, self.last.num_steps, self.last.first_measured)


class WindowSizes:
    """The windows of a job whose calls had the sizes of before, and those whose calls had others."""

    def __init__(self) -> None:
        self._varied: list[int] = []
        self._num_alike = 0

    def wider(self, octaves: int, size_octaves: int) -> int | None:
        """The wider classes that the job needs after a window whose sizes lie `octaves` apart; None if it needs none.

        It does once most windows, at least `MIN_VARIED`, differ in sizes only. An occasional odd step (an evaluation)
        is just measured again, because narrower classes can be tuned better.
        """
        if octaves <= size_octaves:
            self._num_alike += 1
            return None
        self._varied.append(octaves)
        widths = [width for width in self._varied if width != UNLIKE]
        if len(widths) < MIN_VARIED or 2 * len(widths) <= len(self._varied) + self._num_alike:
            return None
        return max(widths)
