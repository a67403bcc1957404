"""Just enough: the least communication resources that keep communication hidden, found on a model fitted as it goes.

Ours, not a paper's: calibrate, allocate, probe, race (spec, Lagom section 3.2). A measurement gives Y and every x_j at
once, so a joint probe of N collectives says N + 1 things about a curve with a dozen constants; after two or three of
them the best assignment is looked for on the model, where trying costs nothing. What Lagom and AutoCCL do one
collective or one knob at a time takes measurements in proportion to them; this does not.

    here                 paper                                        unit
    Measurement.comm_s   x_j                                          s
    comp_s, makespan_s   Y, Z                                         s
    `wire.py`            x(NC, C, A, P)                               s
    `victim.py`          Eqs 4 to 6: waves, bandwidth, cache          s
    `forecast.py`        Z = max(X, Y) of any assignment              s
    `allocate.py`        argmin Z over the lattice

What it reads besides the measurements: bytes of the collectives, and the kernels' grids, wave times and memory bytes
where the group has them (`Kernel`: from a profiler's trace). Without grids the loss of SMs is a smooth curve, and the
steps of whole waves are a residual of each collective by its channels.

Limits, by construction: threads stay as the default has them; a transport is a label like an algorithm (`subspaces.py`
looks at both); only pairs of the race allow for drift; dependencies between the streams enter as a constant gap between
Z and the longer stream only. What the curves cannot express at all and no probe happens upon, a cliff far from the
default, stays unseen: the default is then what it is compared with.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

from lagom_overlap.backends.base import GroupProblem, Outcome
from lagom_overlap.tune.base import Problems, Trial
from lagom_overlap.tune.groupwise import SideBySide
from lagom_overlap.tune.just_enough.effort import check_confidence, effort_named
from lagom_overlap.tune.just_enough.pool import Pool
from lagom_overlap.tune.just_enough.search import GroupSearch
from lagom_overlap.tune.just_enough.sight import Surfaces
from lagom_overlap.tune.just_enough.warm import earlier_pool, first_probe
from lagom_overlap.tune.warm_start import WarmStart

STEP_WORK: Final = 600_000
"""Work of one decision step at most (`GroupModel.work`; measured: 30 to 50 ns a unit)."""


class JustEnough(SideBySide[GroupSearch]):
    """A model-guided tuner over all groups of an iteration, which learn from each other; guarded by construction.

    `effort` is `"quick"`, `"normal"` or `"thorough"`. What is recommended was measured to be faster than the default,
    and by at least `confidence` standard deviations not slower than 0.5 % above it; else it is the default.

    A step plans as many groups as `step_work` allows, those first that have waited longest, then the longest of the
    iteration; the others are measured once more with what they have. Work is counted, not timed: the same tells give
    the same asks on any machine. `warm` is what other runs say; the group's own measurements may refuse it (`warm.py`).

    Raises:
        UnknownNameError: if there is no such effort.
        SpaceError: if the confidence is negative.
    """

    guards_itself: ClassVar[bool] = True

    def __init__(
        self,
        problems: Problems,
        *,
        seed: int = 0,
        effort: str = "normal",
        confidence: float = 1.8,
        step_work: int = STEP_WORK,
        warm: WarmStart | None = None,
    ) -> None:
        surfaces, chosen, beyond = Surfaces(), effort_named(effort), check_confidence(confidence)
        pool = Pool(None if warm is None else earlier_pool(warm, problems, surfaces))
        self._step_work = step_work

        def begin(problem: GroupProblem) -> GroupSearch:
            first = None if warm is None else first_probe(warm, problem)
            return GroupSearch(problem, chosen, confidence=beyond, seed=seed, pool=pool, surfaces=surfaces, first=first)

        super().__init__(problems, begin)

    def tell(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        """Takes the outcomes of all groups, then plans the next probe of as many as one step allows.

        Raises:
            ValueError: if it is not the trial just asked for, or a group's outcome is missing or foreign.
        """
        super().tell(trial, outcomes)
        waiting = sorted((self._runs[name] for name in trial.assignments), key=lambda run: run.urgency, reverse=True)
        spent = 0
        for number, run in enumerate(waiting):
            if number and spent + run.expected_work > self._step_work:
                run.wait()
            else:
                spent += run.plan()
