"""A project: activities with durations, demands on renewable resources and precedence; PSPLIB's `.sm` files.

Format and instances: R. Kolisch, A. Sprecher, "PSPLIB - A project scheduling problem library", European Journal of
Operational Research 96 (1996) 205-216.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lagom_overlap.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """Activities 0 .. n-1: `durations` (whole periods), `demands[i]` per resource, `preds[i]`, and the capacities."""

    name: str
    durations: tuple[int, ...]
    demands: tuple[tuple[int, ...], ...]
    preds: tuple[tuple[int, ...], ...]
    capacities: tuple[int, ...]

    def __post_init__(self) -> None:
        num = len(self.durations)
        if not len(self.demands) == len(self.preds) == num or num == 0:
            raise JobError(
                f"project {self.name!r}: durations, demands and predecessors must be equally many, at least 1"
            )
        if min(self.durations) < 0:
            raise JobError(f"project {self.name!r}: duration is {min(self.durations)}, must not be negative")
        for activity, demand in enumerate(self.demands):
            if len(demand) != len(self.capacities):
                raise JobError(f"project {self.name!r}: activity {activity + 1} needs {len(self.capacities)} demands")
            for resource, (need, capacity) in enumerate(zip(demand, self.capacities, strict=True)):
                if not 0 <= need <= capacity:
                    raise JobError(
                        f"project {self.name!r}: activity {activity + 1} needs {need} of resource {resource + 1}, "
                        f"which has {capacity}"
                    )
        if any(not 0 <= pred < num for preds in self.preds for pred in preds):
            raise JobError(f"project {self.name!r}: a predecessor is no activity of it")
        if len(self.topological()) < num:
            raise JobError(f"project {self.name!r}: precedence has a cycle")

    def __len__(self) -> int:
        return len(self.durations)

    def succs(self) -> list[list[int]]:
        """The successors of each activity."""
        found: list[list[int]] = [[] for _ in self.durations]
        for activity, preds in enumerate(self.preds):
            for pred in preds:
                found[pred].append(activity)
        return found

    def topological(self) -> list[int]:
        """Activities, each after its predecessors; fewer than all if there is a cycle."""
        succs = self.succs()
        waits = [len(preds) for preds in self.preds]
        order = [activity for activity, count in enumerate(waits) if not count]
        for activity in order:
            for succ in succs[activity]:
                waits[succ] -= 1
                if not waits[succ]:
                    order.append(succ)
        return order


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Starts of a project's activities, their makespan, and a proved lower bound of every makespan (periods)."""

    starts: tuple[int, ...]
    makespan: int
    lower_bound: int

    @property
    def is_optimal(self) -> bool:
        """No shorter schedule exists."""
        return self.makespan == self.lower_bound


def check_solution(project: Project, solution: Solution) -> None:
    """Passes if the starts keep precedence and capacities and end at the makespan.

    Raises:
        ValueError: if they do not; names the activities as PSPLIB counts them, from 1.
    """
    starts = solution.starts
    ends = [start + duration for start, duration in zip(starts, project.durations, strict=True)]
    if min(starts) < 0 or max(ends) != solution.makespan:
        raise ValueError(f"starts from {min(starts)} to end {max(ends)}, the solution says {solution.makespan}")
    for activity, preds in enumerate(project.preds):
        for pred in preds:
            if ends[pred] > starts[activity]:
                raise ValueError(f"activity {activity + 1} starts before {pred + 1} has ended")
    for resource, capacity in enumerate(project.capacities):
        # Use rises only where an activity starts.
        for moment in set(starts):
            use = sum(
                demand[resource]
                for demand, start, end in zip(project.demands, starts, ends, strict=True)
                if start <= moment < end
            )
            if use > capacity:
                raise ValueError(f"resource {resource + 1}: {use} of {capacity} in use at {moment}")
    if solution.lower_bound > solution.makespan:
        raise ValueError(f"lower bound {solution.lower_bound} exceeds the makespan {solution.makespan}")


def read_sm(path: Path) -> Project:
    """The project of a PSPLIB `.sm` file.

    Raises:
        JobError: if it cannot be read, is no such file, or has several modes or resources that are used up.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise JobError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return _parsed(path.stem, text)
    except (ValueError, IndexError) as error:
        raise JobError(f"{path}: is no PSPLIB .sm file: {error}") from None


def _parsed(name: str, text: str) -> Project:
    num = int(_header(text, r"jobs \(incl\. supersource/sink \)\s*:\s*(\d+)"))
    num_renewable = int(_header(text, r"-\s*renewable\s*:\s*(\d+)"))
    others = int(_header(text, r"-\s*nonrenewable\s*:\s*(\d+)")) + int(
        _header(text, r"-\s*doubly constrained\s*:\s*(\d+)")
    )
    if others:
        raise JobError(f"{name}: {others} resources are used up, only renewable ones are solved")
    arcs = _table(text, "PRECEDENCE RELATIONS:", num)
    needs = _table(text, "REQUESTS/DURATIONS:", num)
    capacities = _table(text, "RESOURCEAVAILABILITIES:", 1)[0]
    preds: list[list[int]] = [[] for _ in range(num)]
    for activity, (number, num_modes, num_succs, *succs) in enumerate(arcs):
        if number != activity + 1 or len(succs) != num_succs:
            raise ValueError(f"line of job {activity + 1} in PRECEDENCE RELATIONS is damaged")
        if num_modes != 1:
            raise JobError(f"{name}: job {number} has {num_modes} modes, only single-mode projects are solved")
        for succ in succs:
            if not 1 <= succ <= num:
                raise ValueError(f"job {number} precedes job {succ}, there are {num}")
            preds[succ - 1].append(activity)
    return Project(
        name=name,
        durations=tuple(row[2] for row in needs),
        demands=tuple(tuple(row[3 : 3 + num_renewable]) for row in needs),
        preds=tuple(map(tuple, preds)),
        capacities=tuple(capacities[:num_renewable]),
    )


def _header(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"it has no line like {pattern!r}")
    return found[1]


def _table(text: str, title: str, num_rows: int) -> Sequence[list[int]]:
    """The first rows of integers behind a title."""
    _, found, rest = text.partition(title)
    if not found:
        raise ValueError(f"it has no section {title!r}")
    rows = []
    for line in rest.splitlines():
        if re.fullmatch(r"[\s\d]*\d[\s\d]*", line):
            rows.append([int(word) for word in line.split()])
            if len(rows) == num_rows:
                return rows
    raise ValueError(f"section {title!r} has {len(rows)} rows, {num_rows} are needed")
