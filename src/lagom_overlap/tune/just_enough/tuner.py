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
steps of whole waves are noise to it.

Limits, by construction: threads stay as the default has them; a transport is a label like an algorithm, tried when the
forecast favours it; noise is taken as independent from measurement to measurement (no drift); dependencies between the
streams enter as a constant gap between Z and the longer stream only. What the curves cannot express at all and no probe
happens upon, a cliff far from the default, stays unseen: the default is then what it is compared with, no more.
"""

from collections.abc import Mapping
from typing import ClassVar

from lagom_overlap.backends.base import Assignment, Outcome
from lagom_overlap.tune.base import Problems, Trial, check_outcomes, problems_by_name
from lagom_overlap.tune.just_enough.effort import check_confidence, effort_named
from lagom_overlap.tune.just_enough.pool import Pool
from lagom_overlap.tune.just_enough.search import GroupSearch


class JustEnough:
    """A model-guided tuner over all groups of an iteration, which learn from each other; guarded by construction.

    `effort` is `"quick"`, `"normal"` or `"thorough"`. What is recommended was measured to be faster than the default,
    and by at least `confidence` standard deviations not slower than 0.5 % above it; else it is the default.

    Raises:
        UnknownNameError: if there is no such effort.
        SpaceError: if the confidence is negative.
    """

    guards_itself: ClassVar[bool] = True

    def __init__(self, problems: Problems, *, seed: int = 0, effort: str = "normal", confidence: float = 1.8) -> None:
        self._problems = problems_by_name(problems)
        pool, chosen, beyond = Pool(), effort_named(effort), check_confidence(confidence)
        self._searches = {
            name: GroupSearch(problem, chosen, beyond, seed, pool) for name, problem in self._problems.items()
        }
        self._asked: Trial | None = None
        self._num_told = 0

    def ask(self) -> Trial | None:
        """The next probe of every group that is not finished; None when all are."""
        if self._asked is None:
            probes = {name: search.probe for name, search in self._searches.items() if search.probe is not None}
            if probes:
                self._asked = Trial(
                    number=self._num_told,
                    assignments={name: probe.assignment for name, probe in probes.items()},
                    reasons={name: probe.reason for name, probe in probes.items()},
                )
        return self._asked

    def tell(self, trial: Trial, outcomes: Mapping[str, Outcome]) -> None:
        """Takes the outcomes of all groups, then plans each one's next probe.

        Raises:
            ValueError: if it is not the trial just asked for, or a group's outcome is missing or foreign.
        """
        if self._asked is None or trial != self._asked:
            raise ValueError(f"told trial {trial.number}, which is not the one just asked for")
        check_outcomes(self._problems, trial.assignments, outcomes)
        self._asked = None
        self._num_told += 1
        for name in trial.assignments:
            self._searches[name].tell(outcomes[name])
        for name in trial.assignments:
            self._searches[name].plan()

    def recommend(self) -> Mapping[str, Assignment]:
        """What each group's search stands by now; the default where nothing is better beyond doubt."""
        return {name: search.stand for name, search in self._searches.items()}
