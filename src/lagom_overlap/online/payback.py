"""The cost of tuning so far, its gain, and the number of steps after which it has paid for itself."""

from dataclasses import dataclass
from statistics import median

from lagom_overlap.online.ranks.messages import Report, WindowPlan
from lagom_overlap.tuners.verdict import Verdict
from lagom_overlap.units import format_seconds


@dataclass(slots=True)
class Payback:
    """Counts from the moment a job was recorded untouched; `base_s` is the latest time of its default step.

    `steps_per_pair` are the steps whose times make a pair of the verdict. `has_one_clock`: the host's time is the
    device's. On emulated GPUs steps are virtual and what tuning takes is real, so that no sum of them means anything.
    """

    steps_per_pair: int = 0
    has_one_clock: bool = True
    base_s: float = 0.0
    num_steps: int = 0
    elapsed_s: float = 0.0
    _first_s: float | None = None
    _stepped_s: float = 0.0
    _exchange_s: float = 0.0
    _armed_stepped_s: float = 0.0
    _armed_exchange_s: float = 0.0

    def took(self, plan: WindowPlan, report: Report, now_s: float) -> None:
        """Accounts for a finished window of all ranks."""
        self._first_s = now_s if self._first_s is None else self._first_s
        self.elapsed_s = now_s - self._first_s
        self.num_steps += plan.num_steps
        self._stepped_s = report.stepped_s
        self._exchange_s = report.exchange_s

    def arm(self, report: Report, base_s: float) -> None:
        """The search begins: the job was recorded, its untouched step takes `base_s`."""
        self.base_s = base_s
        self.num_steps, self.elapsed_s, self._first_s = 0, 0.0, None
        self._armed_stepped_s = report.stepped_s
        self._armed_exchange_s = report.exchange_s

    def saw_default(self, step_s: float) -> None:
        """The untouched step was measured again."""
        self.base_s = step_s

    @property
    def cost_s(self) -> float:
        """Time lost to slower settings, to agreement and to measuring; not negative."""
        slower_s = self._stepped_s - self._armed_stepped_s - self.num_steps * self.base_s
        return max(0.0, slower_s) + self._exchange_s - self._armed_exchange_s

    def sentence(
        self, verdict: Verdict | None, *, why_none: str = "no settings tried were faster than the default"
    ) -> str:
        """The outcome for people: adopted or not, gain, cost, payback; `why_none`: why nothing came to a verdict."""
        cost = f"tuning took {self.num_steps} steps"
        if self.has_one_clock:
            cost += f" and cost {format_seconds(self.cost_s)}"
        if verdict is None:
            return f"nothing was changed: {why_none}; {cost}"
        if verdict.judgement is None:
            return f"nothing was changed, because the best settings found failed when compared with the default; {cost}"
        compared = verdict.judgement.sentence(steps_per_pair=self.steps_per_pair)
        if not verdict.adopted:
            return f"nothing was changed: the best settings found are {compared}; {cost}"
        gain_s = median(verdict.makespans_s["default"]) - median(verdict.makespans_s["tuned"])
        if gain_s <= 0:  # the medians need not agree with the pairs, which decide
            return f"new settings: {compared}; {cost}"
        if self.has_one_clock:
            cost += f", paid back after {self.cost_s / gain_s:.0f} steps"
        return f"new settings save {format_seconds(gain_s)} a step: {compared}; {cost}"
