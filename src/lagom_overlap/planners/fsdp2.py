"""Which of FSDP2's settings shorten this step: each is simulated as FSDP2 would issue it, under the problem's times.

From FSDP2's own settings the change that gains most is made, and again, as long as one gains `MIN_GAIN` of the step and
fits the memory; then every setting without which the step is as short is dropped. So each that is left was predicted
with itself applied, against the same step without it.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import Plan, PlanProblem, StepTotals
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.effects import MIN_GAIN, SwitchAdvice, as_sets
from lagom_overlap.planners.memory import refuse_beyond
from lagom_overlap.planners.schedule import lower_bound, task_graph
from lagom_overlap.planners.simulated import simulated
from lagom_overlap.units import format_memory, format_percent
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.fsdp2.reduced import is_reduced_in_more
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.fsdp2.visits import Visit, units_of, visits_of

USABLE_MEMORY: Final = 0.9
"""Of the GPU's, where no limit is given: the rest is the framework's and lost to fragments (an assumption)."""
_DEPTHS: Final = (2, 3)
"""An explicit list of one is FSDP2's own order."""
_BUFFERS: Final = (2, 4)
"""Two and four in place of one reduction in flight. Chosen: each holds a unit's gradients."""
_FIELDS: Final = tuple(field.name for field in fields(Fsdp2Settings))
_SIMULATION_STEPS: Final = 40
"""Per operator, of one issue and its simulation: what `OPERATOR_STEPS` is for a graph."""


@dataclass(frozen=True, slots=True)
class _Tried:
    """Settings, and what the step takes that FSDP2 issues with them."""

    settings: Fsdp2Settings
    figures: StepTotals


class Fsdp2:
    """Chooses FSDP2's settings for a step of FSDP2.

    With `reduce_in_param_dtype` gradients may also be reduced in the type in which parameters are gathered, which
    changes results: it is the user's to allow.
    """

    def __init__(self, *, reduce_in_param_dtype: bool = False) -> None:
        self._may_reduce = reduce_in_param_dtype

    def plan(self, problem: PlanProblem) -> Plan:
        """The settings that gain, and the step with them.

        Raises:
            JobError: if it is no step of FSDP2, or the step does not fit the memory limit as it is.
        """
        visits = visits_of(problem.iteration)
        if not visits:
            raise JobError(
                "planner fsdp2: the step gathers no parameters on FSDP2's streams, so FSDP2 has no say in it"
            )
        if self._may_reduce and not is_reduced_in_more(problem.iteration):
            raise JobError(
                "fsdp2.reduce_in_param_dtype: nothing to make smaller: it needs gradients reduced in a type twice "
                "as large as the parameters' (fp32 for bf16), by reduce-scatters alone (no HSDP)"
            )
        search = _Search(problem, visits, may_reduce=self._may_reduce)
        refuse_beyond("FSDP2's own step", search.own.figures.peak_bytes, problem.memory_limit_bytes)
        best = search.best()
        effects, dropped = search.effects(best)
        graph = task_graph(problem)
        return Plan(
            planner="fsdp2",
            rewrites=(),
            iteration=problem.unplanned if best is search.own else problem.with_settings(best.settings),
            lower_bound_s=graph.seconds(lower_bound(graph)) if problem.whole is None else None,
            notes=search.remarks(),
            settings=None if best is search.own else best.settings,
            effects=effects,
            not_advised=dropped,
        )


def memory_limit_bytes(problem: PlanProblem) -> int | None:
    """The most that a step with other settings may hold; None of ranks on CPU cores without a limit of their own."""
    assumed = None if problem.is_blocking else int(USABLE_MEMORY * problem.cluster.gpu.memory_bytes)
    return problem.memory_limit_bytes or assumed


class _Search:
    """Simulates settings of one step, each once."""

    def __init__(self, problem: PlanProblem, visits: tuple[Visit, ...], *, may_reduce: bool) -> None:
        self._may_reduce = may_reduce
        self._problem = problem
        self._deadline: Deadline = problem.deadline()
        limit = memory_limit_bytes(problem)
        self._limit = sys.maxsize if limit is None else limit
        self._tried: dict[Fsdp2Settings, _Tried] = {}
        units = units_of(visits)
        own = problem.settings or Fsdp2Settings(units=units)
        again = {visit.unit for visit in visits if not visit.is_forward} | {*own.kept}
        self._regathered = tuple(unit for unit in units if unit in again)
        # No key of a job says that a stage of a pipeline keeps some of its units.
        self._keeps_all_or_none = problem.told is not None and (problem.pipeline or 1) > 1
        self.own = _Tried(own, self._figures(own, problem.unplanned))
        self._tried[own] = self.own
        self._longest_s = 0.0

    def tried(self, settings: Fsdp2Settings) -> _Tried:
        """The step under settings."""
        found = self._tried.get(settings)
        if found is None:
            begin_s = self._deadline.elapsed_s
            self._deadline.spend(_SIMULATION_STEPS * len(self._problem.unplanned.ops))
            found = self._tried[settings] = _Tried(settings, self._figures(settings))
            self._longest_s = max(self._longest_s, self._deadline.elapsed_s - begin_s)
        return found

    def _figures(self, settings: Fsdp2Settings, issued: Iteration | None = None) -> StepTotals:
        """Of the whole iteration, or of the step, which was issued or is."""
        if self._problem.whole is not None:
            return self._problem.whole(settings)
        step = simulated(self._problem, issued or self._problem.with_settings(settings))
        return StepTotals(step.makespan_s, step.peak_bytes)

    @property
    def _has_time(self) -> bool:
        """Another setting can be simulated before the deadline."""
        return self._deadline.left_s > self._longest_s

    def fits(self, tried: _Tried) -> bool:
        """Whether the step fits; the job's own does where no limit was given, whatever was assumed of the GPU."""
        return tried.figures.peak_bytes <= max(self._limit, self.own.figures.peak_bytes)

    def best(self) -> _Tried:
        """The shortest step found by changing one setting after the other."""
        best = self.own
        while self._has_time:
            changes = self._changes(best.settings)
            found = [self.tried(one) for one in changes if one in self._tried or self._has_time]
            shorter = [one for one in found if self.fits(one) and self._gain(best, one) > MIN_GAIN]
            if not shorter:
                break
            best = min(shorter, key=lambda one: one.figures)
        while fewer := self._without_idle(best):
            best = fewer
        return best

    def _gain(self, before: _Tried, after: _Tried) -> float:
        return (before.figures.step_s - after.figures.step_s) / self.own.figures.step_s

    def _without_idle(self, best: _Tried) -> _Tried | None:
        """The same without a setting that no longer gains; None if each one does."""
        idle = [
            without
            for _, one in self._added(best.settings)
            if self.fits(without := self.tried(one)) and self._gain(without, best) <= MIN_GAIN
        ]
        return min(idle, key=lambda one: one.figures.step_s, default=None)

    def _added(self, settings: Fsdp2Settings) -> list[tuple[str, Fsdp2Settings]]:
        """Each setting that is neither FSDP2's default nor the job's own, in words, and the settings without it."""
        own = self.own.settings
        found = []
        for words, without in set_settings(settings):
            name = next(name for name in _FIELDS if getattr(without, name) != getattr(settings, name))
            if getattr(settings, name) != getattr(own, name):
                found.append((words, replace(settings, **{name: getattr(own, name)})))
        return found

    def _changes(self, settings: Fsdp2Settings) -> Iterator[Fsdp2Settings]:
        """Those first that save bytes: on a large step the budget may end after a few."""
        num = self._most_kept(settings)
        fewer = set() if self._keeps_all_or_none else {num // 2, min(1, num)}
        for count in sorted({num, *fewer} - {0}, reverse=True):
            yield self._keeping(settings, count)
        for buffers in _BUFFERS:
            yield replace(settings, reduce_buffers=buffers)
        for depth in _DEPTHS:
            yield replace(settings, forward_prefetch=depth)
            yield replace(settings, backward_prefetch=depth)
        yield replace(settings, separate_reduce_group=True)
        if self._may_reduce:
            yield replace(settings, reduce_in_param_dtype=True)

    def _keeping(self, settings: Fsdp2Settings, count: int) -> Fsdp2Settings:
        """The last units of forward are the first of backward: they are held for the shortest time."""
        return replace(settings, kept=self._regathered[-count:] if count else ())

    def _most_kept(self, settings: Fsdp2Settings) -> int:
        """How many units may keep their parameters within the memory."""
        low, high = 0, len(self._regathered)
        if self._keeps_all_or_none:
            return high if self.fits(self.tried(self._keeping(settings, high))) else 0
        while low < high and self._has_time:
            middle = high if self.fits(self.tried(self._keeping(settings, high))) else (low + high + 1) // 2
            if self.fits(self.tried(self._keeping(settings, middle))):
                low = middle
            else:
                high = middle - 1
        return low

    def effects(self, best: _Tried) -> tuple[tuple[SwitchAdvice, ...], tuple[SwitchAdvice, ...]]:
        """What each setting brings, largest first, and what each that is not advised would have cost or gained."""
        advised = []
        for words, without in self._added(best.settings):
            advised.append(self._advice(words, without, self.tried(without), best))
        here = {words.partition("=")[0] for words, _ in set_settings(best.settings)}
        others: dict[str, SwitchAdvice] = {}
        for change in self._changes(best.settings):
            if change == best.settings or change not in self._tried:  # the search was ended before it
                continue
            tried = self._tried[change]
            words = next(words for words, _ in set_settings(change) if words not in dict(set_settings(best.settings)))
            name = words.partition("=")[0]
            said = words if self.fits(tried) else f"{words} ({self._too_much(tried)})"
            found = self._advice(said, best.settings, best, tried)
            if name not in here and (name not in others or found.with_s < others[name].with_s):
                others[name] = found
        return (
            tuple(sorted(advised, key=lambda one: -one.gain)),
            tuple(sorted(others.values(), key=lambda one: one.with_s)),
        )

    def _advice(self, words: str, before: Fsdp2Settings, without: _Tried, with_it: _Tried) -> SwitchAdvice:
        key = ""
        if self._problem.told is not None:
            keys, others = with_it.settings.keys(), before.keys()
            key = as_sets({key: value for key, value in keys.items() if value != others[key]})
        return SwitchAdvice(switch=words, without_s=without.figures.step_s, with_s=with_it.figures.step_s, key=key)

    def _too_much(self, tried: _Tried) -> str:
        return f"needs {format_memory(tried.figures.peak_bytes)}, {format_memory(self._limit)} are allowed"

    def remarks(self) -> tuple[str, ...]:
        """What the plan says of the search."""
        limit = "" if self._limit == sys.maxsize else f" and fits {format_memory(self._limit)}"
        if limit and self._problem.memory_limit_bytes is None:
            limit += f", {format_percent(USABLE_MEMORY, 0)} of the GPU's"
        blocking = ("On CPU ranks FSDP2's collectives block the host: no order hides one, only fewer of them gain.",)
        return (
            f"{len(self._tried)} settings simulated as FSDP2 issues them; one is advised if it takes "
            f"{format_percent(MIN_GAIN, 0)} off the step{limit}.",
            *(blocking if self._problem.is_blocking else ()),
            *self._deadline.remarks(),
        )


def set_settings(settings: Fsdp2Settings) -> list[tuple[str, Fsdp2Settings]]:
    """Each setting that is not FSDP2's own, in words, and the settings without it."""
    found: list[tuple[str, Fsdp2Settings]] = []
    if settings.forward_prefetch:
        text = f"set_modules_to_forward_prefetch=the next {settings.forward_prefetch} units"
        found.append((text, replace(settings, forward_prefetch=0)))
    if settings.backward_prefetch:
        text = f"set_modules_to_backward_prefetch=the {settings.backward_prefetch} units before"
        found.append((text, replace(settings, backward_prefetch=0)))
    if settings.kept:
        which = "all units" if len(settings.kept) == len(settings.units) else f"the last {len(settings.kept)} units"
        found.append((f"reshard_after_forward=False for {which}", replace(settings, kept=())))
    if settings.reduce_buffers > 1:
        text = f"set_reduce_scatter_max_input_buffers={settings.reduce_buffers}"
        found.append((text, replace(settings, reduce_buffers=1)))
    if settings.separate_reduce_group:
        found.append(("set_separate_reduce_scatter_group=True", replace(settings, separate_reduce_group=False)))
    if settings.reduce_in_param_dtype:
        text = "reduce_dtype=param_dtype (allowed; results change)"
        found.append((text, replace(settings, reduce_in_param_dtype=False)))
    return found
