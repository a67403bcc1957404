"""A backend whose every time is written down by the test, and a clock that only its measurements move."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from lagom_overlap.backends.base import BackendRequest
from lagom_overlap.collective import CommConfig, ConfigSpace, Subspace
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement, Outcome
from lagom_overlap.workload import OverlapGroup

Setting = tuple[int | None, ...]
"""An assignment by its channels; the untouched engine is None."""

Times = Mapping[tuple[str, Setting], Sequence[float]]
"""Makespans in seconds of a group under a setting, one per measurement; the last one stays."""

JOB = {
    "job": {"name": "toy job"},
    "group": [
        {
            "name": "g",
            "count": 2,
            "op": [{"name": "mm", "gemm": [8, 8, 8]}],
            "comm": [
                {"name": "ag", "kind": "all_gather", "bytes": "1 MiB"},
                {"name": "rs", "kind": "reduce_scatter", "bytes": "1 MiB"},
            ],
        },
        {
            "name": "h",
            "count": 3,
            "op": [{"name": "mm", "gemm": [8, 8, 8]}],
            "comm": [{"name": "ar", "kind": "all_reduce", "bytes": "1 MiB"}],
        },
    ],
    "tune": {"tuner": "exhaustive", "guard": False, "pairs": 3, "budget": {"measurements": 40, "seconds": 1000}},
}
"""Group g twice and group h three times an iteration."""

CHANNELS = (2, 4)
"""What may be tried; the baselines lie next to it, so that no two contenders share a setting."""
BASELINES = {"engine_default": 1, "fixed_max": 16, "fixed_min": 8}

UNTOUCHED_G: Setting = (None, None)
UNTOUCHED_H: Setting = (None,)
TUNED_G: Setting = (2, 4)
TUNED_H: Setting = (4,)

SEARCHED: Times = {
    ("g", UNTOUCHED_G): [50.0],
    ("g", (2, 2)): [5.0],
    ("g", TUNED_G): [0.5],
    ("g", (4, 2)): [7.0],
    ("g", (4, 4)): [9.0],
    ("h", UNTOUCHED_H): [40.0],
    ("h", (2,)): [6.0],
    ("h", TUNED_H): [0.5],
}
"""One search: far from the verdict's times, so that none can pass for the other."""

JUDGED: Times = {
    # Iterations, 2 g + 3 h: 6, 28, 20
    # The default against itself first: 16 twice.
    ("g", UNTOUCHED_G): [2, 2, 1.5, 2, 4],
    ("h", UNTOUCHED_H): [4, 4, 1, 8, 4],
    # 8, 8, 10
    ("g", TUNED_G): [1, 1, 2],
    ("h", TUNED_H): [2, 2, 2],
    # engine_default: 9, 12, 20
    ("g", (1, 1)): [1.5, 3, 4],
    ("h", (1,)): [2, 2, 4],
    # fixed_min: 20, 20, 20
    ("g", (8, 8)): [4],
    ("h", (8,)): [4],
    # fixed_max: 14, 16, 15
    ("g", (16, 16)): [1, 2, 1.5],
    ("h", (16,)): [4],
}
"""A pair of the default, and three rounds of the verdict: too few to adopt what varies so."""

STEADY: Times = {key: times[-1:] for key, times in JUDGED.items()}
"""A verdict whose times repeat to the last bit: 20 over 10."""


def in_turn(*phases: Times) -> dict[tuple[str, Setting], list[float]]:
    """What comes first, then what comes after it."""
    keys = dict.fromkeys(key for phase in phases for key in phase)
    return {key: [time for phase in phases for time in phase.get(key, ())] for key in keys}


def setting_of(assignment: Assignment) -> Setting:
    return tuple(config.num_channels for config in assignment)


def assignment_of(setting: Setting) -> Assignment:
    return tuple(CommConfig(num_channels=value) for value in setting)


def job(**tune: Any) -> JobSpec:
    raw: dict[str, Any] = copy.deepcopy(JOB)
    raw["tune"].update(tune)
    return parse_job(raw, "job.toml")


@dataclass(frozen=True, slots=True)
class Call:
    """One measurement, as it was asked for and as it was answered."""

    group: str
    setting: Setting
    makespan_s: float


def _nothing(_call: int) -> None:
    return None


@dataclass(slots=True)
class StubBackend:
    """Answers from a table: Y is half the makespan, the first collective a quarter, the second an eighth.

    A makespan of 0 stands for a configuration that cannot run. `before_call` is called with the number of each
    measurement before it is made, from 0, and may raise. Every measurement takes one second of the clock.
    """

    times: Times
    default: int | None = None
    baselines: Mapping[str, int] = field(default_factory=lambda: BASELINES)
    before_call: Callable[[int], None] = _nothing
    description: str = "stub: times that are made up"
    calls: list[Call] = field(default_factory=list)
    num_closed: int = 0
    num_asked: int = 0
    opened_as: str | None = None
    request: BackendRequest | None = None

    def open(self, name: str, request: BackendRequest) -> "StubBackend":
        self.opened_as, self.request = name, request
        return self

    def monotonic(self) -> float:
        """The clock."""
        return 1000.0 + len(self.calls)

    def problem(self, group: OverlapGroup) -> GroupProblem:
        num_comms = len(group.comms)
        return GroupProblem(
            group=group,
            spaces=(ConfigSpace((Subspace(num_channels=CHANNELS),)),) * num_comms,
            default=assignment_of((self.default,) * num_comms),
            baselines={name: assignment_of((value,) * num_comms) for name, value in self.baselines.items()},
        )

    def measure(self, group: OverlapGroup, assignment: Assignment) -> Outcome:
        self.num_asked += 1
        self.before_call(self.num_asked - 1)
        setting = setting_of(assignment)
        number = sum((call.group, call.setting) == (group.name, setting) for call in self.calls)
        answers = self.times[group.name, setting]
        makespan_s = answers[min(number, len(answers) - 1)]
        self.calls.append(Call(group.name, setting, makespan_s))
        if makespan_s == 0:
            return Failure(f"{setting} cannot run")
        span = Span(name="mm", kind=SpanKind.COMP, stream="compute", start_s=0.0, end_s=makespan_s)
        return Measurement(
            makespan_s=makespan_s,
            comp_s=makespan_s / 2,
            comm_s=(makespan_s / 4, makespan_s / 8)[: len(assignment)],
            timeline=Timeline((span,)),
        )

    def close(self) -> None:
        self.num_closed += 1

    def settings_of(self, group: str) -> list[Setting]:
        """What was measured of a group, in order."""
        return [call.setting for call in self.calls if call.group == group]


def install(monkeypatch: pytest.MonkeyPatch, stub: StubBackend) -> StubBackend:
    """Puts the stub and its clock in the place of the machine; the report's page is one line, for speed."""
    monkeypatch.setattr(Job, "open", lambda _, name, request: stub.open(name, request))
    for module in ("tune", "compare", "measure"):
        monkeypatch.setattr(f"lagom_overlap.verbs.{module}.time", SimpleNamespace(monotonic=stub.monotonic))
    monkeypatch.setattr("lagom_overlap.verbs.tune.render_tuning", lambda result: f"a page of {result.job}")
    return stub


def spy(monkeypatch: pytest.MonkeyPatch, target: str, key: str) -> list[Any]:
    """What a function is given under a keyword, call by call; it does what it did."""
    module, _, name = target.rpartition(".")
    real = getattr(import_module(module), name)
    seen: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs[key])
        return real(*args, **kwargs)

    monkeypatch.setattr(target, call)
    return seen


def raising(error: BaseException, at: int) -> Callable[[int], None]:
    """Raises when measurement number `at` is asked for."""

    def raise_it(number: int) -> None:
        if number == at:
            raise error

    return raise_it
