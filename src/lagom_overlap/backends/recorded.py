"""The recorded backend: replays the measurements of an earlier run of the same job.

A configuration that was measured several times gives its measurements in their order, over and over; one that was never
measured is a `Failure`. Nothing is interpolated.

The job's limits (`tune.space`) narrow the recorded spaces: a replay can try less than was recorded, never more. The
default and the baselines stay as recorded, because nothing else can be replayed; under narrower limits a baseline may
lie outside its space.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from lagom_overlap.backends.base import BackendRequest
from lagom_overlap.collective import NO_LAUNCHES, ConfigSpace, LaunchSpace, SpaceLimits, Subspace
from lagom_overlap.collective.space import RESOURCE_KNOBS
from lagom_overlap.errors import BundleError, LagomError, SpaceError
from lagom_overlap.record import read_regular
from lagom_overlap.tuners.bundle import MAX_BUNDLE_BYTES, BundleHeader, parse_header
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Outcome
from lagom_overlap.tuners.rows import GroupRow, assignment_of, outcome_of
from lagom_overlap.workload import OverlapGroup

_FIELD_OF: Final = {
    "algorithm": "algorithms",
    "protocol": "protocols",
    "transport": "transports",
    **{knob: knob for knob in RESOURCE_KNOBS},
}
"""Knob, which is also the key below `tune.space` -> field of `SpaceLimits`."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """The values that the job allows for one knob."""

    knob: str
    values: tuple[object, ...]

    def __str__(self) -> str:
        return f"tune.space.{self.knob} is {shown(self.values)}"

    def within(self, subspace: Subspace) -> Subspace | None:
        """What the limit leaves of a subspace; all of it where the collective lacks the knob, None if nothing."""
        values = _held(subspace, self.knob)
        if values == (None,):
            return subspace
        kept = tuple(value for value in values if value in self.values)
        if not kept:
            return None
        change: dict[str, Any] = {self.knob: kept} if self.knob in RESOURCE_KNOBS else {}
        return replace(subspace, **change)


def shown(values: Iterable[object]) -> list[object]:
    """Values as a job file spells them: the words of enums, not their names in our code."""
    return [str(value) if isinstance(value, str) else value for value in values]


def check_recorded(limits: SpaceLimits, recorded: Iterable[ConfigSpace], recorded_limits: SpaceLimits | None) -> None:
    """Refuses a value that no collective of the recording was offered.

    A value among the recorded job's own limits (`recorded_limits`) passes: its backend may have left it out where it
    could not be set, and the same job must be free to ask for it again.

    Raises:
        SpaceError: naming the key, the value and what was recorded.
    """
    subspaces = [subspace for space in recorded for subspace in space.subspaces]
    for limit in _limits(limits):
        recorded_values = dict.fromkeys(value for subspace in subspaces for value in _held(subspace, limit.knob))
        allowed = set(recorded_values) | set(_asked(recorded_limits, limit.knob) or ())
        for value in limit.values:
            if value not in allowed:
                words = shown(held for held in recorded_values if held is not None)
                has = f"holds {words}" if words else "holds no such knob"
                raise SpaceError(f"tune.space.{limit.knob} holds {shown([value])[0]!r}, but the recording {has}")


def within_limits(space: ConfigSpace, limits: SpaceLimits, what: str) -> ConfigSpace:
    """The part of a recorded space that the job allows; `what` names the collective in an error.

    Raises:
        SpaceError: if nothing is left, naming the key that leaves nothing.
    """
    left: tuple[Subspace, ...] = space.subspaces
    limited = _limits(limits)
    for number, limit in enumerate(limited, start=1):
        kept = tuple(cut for subspace in left if (cut := limit.within(subspace)) is not None)
        if not kept:
            values = shown(dict.fromkeys(value for subspace in left for value in _held(subspace, limit.knob)))
            suffix = f" under {', '.join(map(str, limited[: number - 1]))}" if number > 1 else ""
            raise SpaceError(f"{limit}, but the recording of {what} holds {values}{suffix}: nothing is left to try")
        left = kept
    return ConfigSpace(left)


def launches_within(recorded: LaunchSpace, wanted: LaunchSpace | None) -> LaunchSpace:
    """The part of the recorded computation's side that the job asks for; nothing where it does not ask.

    Raises:
        SpaceError: if it asks for a value that was not recorded.
    """
    if wanted is None:
        return NO_LAUNCHES
    for key, field in (("sm_carveout", "sm_carveouts"), ("launch_order", "orders"), ("stream_priority", "priorities")):
        recorded_values = getattr(recorded, field)
        for value in getattr(wanted, field):
            if value not in recorded_values:
                has = f"holds {shown(recorded_values)}" if recorded_values else "holds no such knob"
                raise SpaceError(f"tune.space.{key} holds {shown([value])[0]!r}, but the recording {has}")
    return wanted


def _limits(limits: SpaceLimits) -> list[_Limit]:
    asked = ((knob, _asked(limits, knob)) for knob in _FIELD_OF)
    return [_Limit(knob, tuple(values)) for knob, values in asked if values is not None]


def _asked(limits: SpaceLimits | None, knob: str) -> Sequence[object] | None:
    values: Sequence[object] | None = None if limits is None else getattr(limits, _FIELD_OF[knob])
    return values


def _held(subspace: Subspace, knob: str) -> tuple[object, ...]:
    value = getattr(subspace, knob)
    return value if knob in RESOURCE_KNOBS else (value,)


Visit = tuple[str, int]
"""When an assignment was measured: a verdict's round, or the how-manieth time outside of one: a surface's pass."""


class _Line(msgspec.Struct, frozen=True):
    """The part of a journal line that a replay needs; the rest is the study's."""

    groups: dict[str, GroupRow]
    round: int | None = None
    step_s: float | None = None


class Recorded:
    """A bundle in memory; see the module's docstring. `recorded_backend` names the backend that it was recorded on."""

    def __init__(
        self, header: BundleHeader, lines: list[tuple[int, _Line]], where: str, limits: SpaceLimits | None = None
    ) -> None:
        self._header = header
        self._lines = lines
        self._where = where
        self._limits = limits or SpaceLimits()
        self.recorded_backend = header.backend
        self.description = f"replayed: {header.description or header.backend}"
        self._visits: dict[str, dict[Assignment, dict[Visit, Outcome]]] = {}
        self._replay: dict[tuple[str, Assignment], cycle[Outcome]] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """The caveats that belonged to the recorded figures; empty if the bundle does not say."""
        return self._header.notes

    @property
    def arm_words(self) -> Mapping[str, str]:
        """The recorded backend's contenders in words, by arm; empty if the bundle does not say."""
        return MappingProxyType(self._header.arm_words)

    def problem(self, group: OverlapGroup) -> GroupProblem:
        """The group as it was when the bundle was recorded, its spaces within the job's limits.

        Raises:
            BundleError: if the bundle does not hold this group, or a line of it is damaged.
            SpaceError: if the limits name a value that was not recorded, or leave nothing.
        """
        recorded = self._header.groups.get(group.name)
        if recorded is None or recorded.comms != group.comm_names:
            names = ", ".join(sorted(self._header.groups))
            raise BundleError(f"{self._where}: it holds no group {group.name!r} with these collectives; it has {names}")
        try:
            problem = GroupProblem(
                group=group,
                spaces=recorded.spaces,
                default=recorded.default,
                baselines=recorded.baselines,
                launches=recorded.launches,
            )
        except ValueError as error:
            raise BundleError(f"{self._where}: line 1 is damaged: group {group.name!r}: {error}") from None
        visits: dict[Assignment, dict[Visit, Outcome]] = defaultdict(dict)
        for number, line in self._lines:
            if group.name not in line.groups or line.step_s is not None:  # a step timed whole says nothing of it
                continue
            row = line.groups[group.name]
            try:
                earlier = visits[assignment_of(row, problem)]
                earlier[_visit(line, earlier)] = outcome_of(row, problem)
            except (ValueError, LagomError) as error:
                raise BundleError(f"{self._where}: line {number} is damaged: {error}") from None
        self._visits[group.name] = dict(visits)
        for assignment, visit in visits.items():
            self._replay[group.name, assignment] = cycle(visit.values())
        launches = launches_within(recorded.launches, self._limits.launches)
        return replace(problem, spaces=self._narrowed(problem), launches=launches)

    def measure(self, group: OverlapGroup, assignment: Assignment) -> Outcome:
        """The next recorded outcome of that assignment, or a failure if there is none."""
        replay = self._replay.get((group.name, assignment))
        return Failure("not in the recording") if replay is None else next(replay)

    def visits(self, group: OverlapGroup) -> Mapping[Assignment, Mapping[Visit, Outcome]]:
        """Every recorded outcome of a group whose problem was asked for, by assignment and visit."""
        return MappingProxyType(self._visits[group.name])

    def close(self) -> None:
        """Nothing to free."""

    def _narrowed(self, problem: GroupProblem) -> tuple[ConfigSpace, ...]:
        every = (space for recorded_group in self._header.groups.values() for space in recorded_group.spaces)
        check_recorded(self._limits, every, self._header.limits)
        group = problem.group
        return tuple(
            within_limits(space, self._limits, f"{comm.name!r} of group {group.name!r}")
            for comm, space in zip(group.comms, problem.spaces, strict=True)
        )


def _visit(line: _Line, earlier: Mapping[Visit, Outcome]) -> Visit:
    if line.round is not None and ("round", line.round) not in earlier:
        return "round", line.round
    return "pass", sum(kind == "pass" for kind, _ in earlier)


def _path_of(bundle: Path) -> Path:
    return bundle / "measurements.jsonl" if bundle.is_dir() else bundle


def _read(path: Path) -> list[str]:
    try:
        return read_regular(path, MAX_BUNDLE_BYTES).decode().splitlines()
    except OSError as error:
        raise BundleError(f"bundle {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BundleError(f"bundle {str(path)!r} is not UTF-8 text") from None


def open_backend(request: BackendRequest) -> Recorded:
    """The backend over the bundle that the request names: a run folder, or its `measurements.jsonl`.

    Raises:
        BundleError: if it cannot be read, is damaged, or was recorded for another job.
    """
    if request.bundle is None:
        raise BundleError("the recorded backend needs a bundle: a run folder or its measurements.jsonl")
    path = _path_of(request.bundle)
    lines = _read(path)
    where = f"bundle {str(path)!r}"
    if not lines:
        raise BundleError(f"{where} is empty")
    header = parse_header(lines[0], where)
    if header.job_fingerprint != request.job_fingerprint:
        raise BundleError(
            f"{where} was recorded for another job (fingerprint {header.job_fingerprint}, "
            f"this job has {request.job_fingerprint}); groups, collectives, ranks and machine must be the same"
        )
    decoder = msgspec.json.Decoder(_Line)
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append((number, decoder.decode(line)))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BundleError(f"{where}: line {number} is damaged: {error}") from None
    return Recorded(header, rows, where, request.limits)
