"""`lagom run --observe`: the share of a job's communication time that each knob could reach.

Nothing of the job is changed. A few steps are sampled with PyTorch's profiler (unless the job's own runs): on a GPU
NCCL's kernels with their lengths, on the CPU gloo's collectives from issue to completion. What each knob reaches is
taken from the kind of the call and the release of NCCL (`nccl_plugin.support`); on gloo from what the engine can run.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.collective.size_class import LEAST_BYTES, is_small
from lagom_overlap.engines.cpu_limits import KINDS as GLOO_KINDS
from lagom_overlap.nccl_plugin.support import NO, Knob, NcclVersion, Settable, best_route, support_of
from lagom_overlap.nccl_plugin.table_layout import KINDS as TUNER_KINDS
from lagom_overlap.results.conclusion import Conclusion
from lagom_overlap.units import format_bytes, format_percent, format_seconds

FIRST_SAMPLED: Final = 3
"""The first sampled step; the steps before it warm up connections, allocators and compilation."""
NUM_SAMPLED: Final = 3
"""Sampled steps: enough for a share of time, few enough not to disturb the job. Chosen, not measured."""
SAMPLED_APART: Final = 2
"""Never two steps in a row: see `job_profiler`."""
_GLOO_KNOBS: Final = (Knob.CHANNELS, Knob.CHUNK)


@dataclass(frozen=True, slots=True)
class SeenCall:
    """One collective of a sampled step; `kind` None: an unknown kind. `is_reachable` False: no knob reaches it.

    `num_bytes` is 0 where they are not known; online tuning leaves calls below `LEAST_BYTES` alone.
    """

    kind: CollectiveKind | None
    duration_s: float
    is_reachable: bool = True
    num_bytes: int = 0

    @property
    def is_small(self) -> bool:
        """Whether it is left alone for its size."""
        return self.num_bytes > 0 and is_small(self.num_bytes)


@dataclass(slots=True)
class Shares:
    """Communication seconds over the sampled steps, by kind and by the knob that reaches them."""

    nccl: NcclVersion | None
    num_steps: int = 0
    by_kind_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_knob_s: dict[Knob, float] = field(default_factory=lambda: defaultdict(float))
    small_s: float = 0.0

    def add_step(self, calls: Iterable[SeenCall]) -> None:
        """Counts a step."""
        self.num_steps += 1
        for call in calls:
            self.by_kind_s[call.kind or "other"] += call.duration_s
            if call.is_small:
                self.small_s += call.duration_s
            elif call.is_reachable and call.kind is not None:
                for knob in knobs_of(call.kind, self.nccl):
                    self.by_knob_s[knob] += call.duration_s

    @property
    def total_s(self) -> float:
        """All communication."""
        return sum(self.by_kind_s.values())

    def ratios(self) -> Mapping[Knob, float]:
        """The share of the communication time that each knob reaches, 0 to 1."""
        total_s = self.total_s
        return {knob: self.by_knob_s[knob] / total_s if total_s else 0.0 for knob in Knob}


def knobs_of(kind: CollectiveKind, nccl: NcclVersion | None) -> tuple[Knob, ...]:
    """The knobs that reach a kind of call by a route of ours; `nccl` None: the job runs on gloo."""
    if nccl is None:
        return _GLOO_KNOBS if kind in GLOO_KINDS else ()
    if kind is CollectiveKind.ALL_TO_ALL:  # sends of a pipeline go by no sibling
        knob = Knob.ALL_TO_ALL_CHANNELS
        return (knob,) if best_route(nccl, knob) is not None else ()
    if kind not in TUNER_KINDS:
        return ()
    return tuple(k for k in Knob if k is not Knob.ALL_TO_ALL_CHANNELS and best_route(nccl, k) is not None)


def report_lines(shares: Shares, reason: str = "") -> list[str]:
    """The report for people; `reason` is why the last step that should have been sampled was not."""
    where = "gloo" if shares.nccl is None else f"NCCL {'.'.join(map(str, shares.nccl))}"
    if not shares.num_steps or not shares.total_s:
        why = f" ({reason})" if reason else ""
        return [f"observed no collective of a training step on {where}{why}: nothing can be said about it"]
    per_step_s = shares.total_s / shares.num_steps
    kinds = sorted(shares.by_kind_s.items(), key=lambda pair: -pair[1])
    words = ", ".join(f"{kind} {format_percent(time_s / shares.total_s, 0)}" for kind, time_s in kinds)
    lines = [
        f"{where}: {per_step_s * 1e3:.2f} ms of collectives per step ({shares.num_steps} steps sampled): {words}",
        "share of that time which a setting could reach:",
    ]
    ratios = shares.ratios()
    lines += [
        f"  {knob:22} {format_percent(ratio):>7}  {_way(knob, shares.nccl)}".rstrip() for knob, ratio in ratios.items()
    ]
    if shares.small_s:
        small = format_percent(shares.small_s / shares.total_s, 0)
        lines.append(f"  {small} of the time is of calls below {format_bytes(LEAST_BYTES)}, which are left alone")
    return lines


def conclusion(shares: Shares, reason: str, command: str, *, trace: str = "", is_in_adapter: bool = True) -> Conclusion:
    """What was seen, in three lines; `reason` as for `report_lines`, `trace` names the step that was kept.

    `is_in_adapter`: on gloo an adapter calls the collectives of what was trained; no matter on NCCL.
    """
    where = "gloo" if shares.nccl is None else "NCCL"
    if not shares.num_steps or not shares.total_s:
        why = reason or f"steps {FIRST_SAMPLED} to {FIRST_SAMPLED + SAMPLED_APART * (NUM_SAMPLED - 1)} are sampled"
        if shares.num_steps:
            why = f"{shares.num_steps} sampled steps call none"
        next_line = f"lagom run --observe -- {command}    # with more steps"
        return Conclusion(f"no collective of a training step was seen on {where}", why, next_line)
    knob, ratio = max(shares.ratios().items(), key=lambda pair: pair[1])
    result = f"{format_seconds(shares.total_s / shares.num_steps)} of collectives a step on {where}"
    if not ratio:
        why = f"no knob reaches any of them: {', '.join(shares.by_kind_s)}"
        if shares.small_s:
            share = format_percent(shares.small_s / shares.total_s, 0)
            why = f"calls below {format_bytes(LEAST_BYTES)} are left alone, and {share} of the time is of such"
        return Conclusion(f"{result}; nothing of it can be set", why, _look(trace, command))
    if not (is_in_adapter or shares.nccl is not None):
        why = "no FSDP2 or DDP module calls them: on gloo those that the job itself calls can be set, DTensor's cannot"
        next_line = f"lagom run --online --adapters calls -- {command}"
        return Conclusion(f"{result}; settings reach at most {format_percent(ratio, 0)} of it", why, next_line)
    result += f"; settings reach {format_percent(ratio, 0)} of it"
    why = f"{knob} can be set {_way(knob, shares.nccl)}; how much of that is a gain, only a trial shows"
    return Conclusion(result, why, f"lagom run --online -- {command}")


def _look(trace: str, command: str) -> str:
    return f"lagom analyze {trace}" if trace else f"{command}    # as it is: there is nothing to set"


def _way(knob: Knob, nccl: NcclVersion | None) -> str:
    if nccl is None:
        return "by slices of the gloo engine" if knob in _GLOO_KNOBS else "gloo has no such knob"
    route = best_route(nccl, knob)
    if route is None:
        return "no route of ours"
    support = support_of(nccl)[route].get(knob, NO)
    limits = "" if support.reach is Settable.YES else f", {support.reach}{f' ({support.note})' if support.note else ''}"
    return f"by the {route} route{limits}"


@dataclass(slots=True)
class Sampler:
    """Decides which steps are sampled; `begin` starts a profiler, `end` gives the step's calls (None: not told).

    `reason` is why the last step that should have been sampled was not: the job's own profiler.
    """

    shares: Shares
    begin: Callable[[], None]
    end: Callable[[], list[SeenCall] | None]
    why_not: Callable[[], str]
    reason: str = ""
    _step: int = 0
    _is_sampling: bool = False

    def next_step(self) -> bool:
        """At the beginning of every step; True once, when the last sample is in."""
        is_last = self._finish()
        self._step += 1
        since_first = self._step - FIRST_SAMPLED
        if since_first >= 0 and since_first % SAMPLED_APART == 0 and self.shares.num_steps < NUM_SAMPLED:
            self.reason = self.why_not()
            if not self.reason:
                self.begin()
                self._is_sampling = True
        return is_last

    def close(self) -> bool:
        """At the end of the job; True if that brought the last sample in."""
        return self._finish()

    def _finish(self) -> bool:
        if not self._is_sampling:
            return False
        self._is_sampling = False
        calls = self.end()
        if calls is not None:
            self.shares.add_step(calls)
        return self.shares.num_steps == NUM_SAMPLED
