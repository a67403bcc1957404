from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.plan.rcpsp import Project, Solution, check_solution, read_sm
from lagom_overlap.plan.rcpsp.generation import justified, makespan, packed, serial

SM = """************************************************************************
file with basedata            : toy.bas
************************************************************************
projects                      :  1
jobs (incl. supersource/sink ):  5
horizon                       :  9
RESOURCES
  - renewable                 :  2   R
  - nonrenewable              :  0   N
  - doubly constrained        :  0   D
************************************************************************
PRECEDENCE RELATIONS:
jobnr.    #modes  #successors   successors
   1        1          3           2   3   4
   2        1          1           5
   3        1          1           5
   4        1          1           5
   5        1          0
************************************************************************
REQUESTS/DURATIONS:
jobnr. mode duration  R 1  R 2
------------------------------------------------------------------------
  1      1     0       0    0
  2      1     3       2    0
  3      1     4       2    1
  4      1     2       1    1
  5      1     0       0    0
************************************************************************
RESOURCEAVAILABILITIES:
  R 1  R 2
    3    1
************************************************************************
"""


def _written(folder: Path, text: str = SM) -> Path:
    path = folder / "toy.sm"
    path.write_text(text)
    return path


def _random_project(random: Random, num: int = 6) -> Project:
    capacities = (3, 2)
    return Project(
        name="random",
        durations=tuple(random.randint(1, 3) for _ in range(num)),
        demands=tuple(tuple(random.randint(0, c) for c in capacities) for _ in range(num)),
        preds=tuple(tuple(p for p in range(a) if random.random() < 0.2) for a in range(num)),
        capacities=capacities,
    )


def _shortest_by_enumeration(project: Project) -> int:
    """Over all vectors of starts, shortest horizon first."""
    for horizon in range(1, sum(project.durations) + 1):
        ranges = [range(horizon - duration + 1) for duration in project.durations]
        for starts in product(*ranges):
            length = max(s + d for s, d in zip(starts, project.durations, strict=True))
            try:
                check_solution(project, Solution(starts=starts, makespan=length, lower_bound=0))
            except ValueError:
                continue
            return length
    raise AssertionError


def test_a_file_of_psplib_is_read(tmp_path: Path) -> None:
    project = read_sm(_written(tmp_path))
    assert project == Project(
        name="toy",
        durations=(0, 3, 4, 2, 0),
        demands=((0, 0), (2, 0), (2, 1), (1, 1), (0, 0)),
        preds=((), (0,), (0,), (0,), (1, 2, 3)),
        capacities=(3, 1),
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("nonrenewable              :  0", "nonrenewable              :  1", "1 resources are used up"),
        ("   2        1          1           5", "   2        3          1           5", "job 2 has 3 modes"),
        ("   2        1          1           5", "   2        1          2           5", "job 2 in PRECEDENCE"),
        ("   2        1          1           5", "   2        1          1           9", "job 2 precedes job 9"),
        ("REQUESTS/DURATIONS:", "REQUESTS:", "no section"),
        ("    3    1\n", "    1    1\n", "needs 2 of resource 1, which has 1"),
        ("   5        1          0", "   5        1          1           2", "cycle"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in SM
    with pytest.raises(JobError, match=words) as raised:
        read_sm(_written(tmp_path, SM.replace(old, new, 1)))
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be read"):
        read_sm(tmp_path / "none.sm")


@pytest.mark.parametrize(
    ("starts", "makespan_", "words"),
    [
        ((0, 0, 0, 0, 4), 4, "4 of 3 in use|5 of 3 in use|2 of 1 in use"),
        ((0, 0, 3, 7, 8), 9, "5 starts before 4"),
        ((0, 0, 3, 7, 9), 8, "the solution says 8"),
    ],
)
def test_a_wrong_solution_does_not_pass(tmp_path: Path, starts: tuple[int, ...], makespan_: int, words: str) -> None:
    project = read_sm(_written(tmp_path))
    with pytest.raises(ValueError, match=words):
        check_solution(project, Solution(starts=starts, makespan=makespan_, lower_bound=0))


def test_generated_schedules_are_legal_and_justification_never_lengthens() -> None:
    for seed in range(40):
        random = Random(seed)
        project = _random_project(random, 15)
        ahead = packed(project)
        starts = serial(ahead, [random.random() for _ in range(15)])
        length = makespan(ahead, starts)
        check_solution(project, Solution(starts=tuple(starts), makespan=length, lower_bound=0))
        better, shorter = justified(ahead, ahead.reversed(), starts)
        check_solution(project, Solution(starts=tuple(better), makespan=shorter, lower_bound=0))
        assert shorter <= length


def test_the_solver_finds_and_proves_what_enumeration_finds() -> None:
    pytest.importorskip("ortools", reason="needs the extra plan (ortools)")
    from lagom_overlap.plan.rcpsp.solve import simple_bound, solve

    for seed in range(6):
        project = _random_project(Random(seed), 4)
        solution = solve(project, 10.0)
        shortest = _shortest_by_enumeration(project)
        assert simple_bound(project) <= shortest
        assert solution.makespan == solution.lower_bound == shortest


def test_capacities_of_many_bits_do_not_run_into_each_other() -> None:
    wide = replace(_random_project(Random(1), 8), capacities=(1 << 40, 1), demands=((1 << 39, 1),) * 8)
    starts = serial(packed(wide), range(8))
    check_solution(wide, Solution(starts=tuple(starts), makespan=makespan(packed(wide), starts), lower_bound=0))
    assert makespan(packed(wide), starts) == sum(wide.durations)  # one at a time on the second
