import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from threading import Timer

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.plan.deadline import ended_by_ctrl_c
from lagom_overlap.plan.rcpsp import Project, Solution, check_solution, read_sm
from lagom_overlap.plan.rcpsp.bounds import lower_bound
from lagom_overlap.plan.rcpsp.search import GeneticSearch

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


def _topological(random: Random, preds: Sequence[Sequence[int]]) -> list[int]:
    """A random list, each activity after those it waits for."""
    order: list[int] = []
    while len(order) < len(preds):
        left = [a for a in range(len(preds)) if a not in order and set(preds[a]) <= set(order)]
        order.append(random.choice(left))
    return order


def _placed(project: Project, preds: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """Serial schedule generation as the books have it: period by period, resource by resource."""
    free = [list(project.capacities) for _ in range(sum(project.durations) + 1)]
    starts = [0] * len(project)
    for activity in order:
        duration, demand = project.durations[activity], project.demands[activity]
        start = max((starts[pred] + project.durations[pred] for pred in preds[activity]), default=0)
        while any(
            need > have for at in range(start, start + duration) for need, have in zip(demand, free[at], strict=True)
        ):
            start += 1
        for at in range(start, start + duration):
            free[at] = [have - need for have, need in zip(free[at], demand, strict=True)]
        starts[activity] = start
    return starts


def _makespan(project: Project, starts: Sequence[int]) -> int:
    return max(start + duration for start, duration in zip(starts, project.durations, strict=True))


def _checked(project: Project, starts: Sequence[int]) -> int:
    """The makespan of a schedule that has passed the checker."""
    length = _makespan(project, starts)
    check_solution(project, Solution(starts=tuple(starts), makespan=length, lower_bound=0))
    return length


def _random_projects() -> Iterator[tuple[Random, Project]]:
    """With one word, several words and no resource; with activities of no duration, of no demand, in a common unit."""
    for seed in range(60):
        random = Random(seed)
        num, unit = random.randint(1, 25), random.choice((1, 1, 5))
        capacities = tuple(random.choice((0, 1, 7, 20, 10**12)) for _ in range(random.choice((0, 1, 4, 9))))
        yield (
            random,
            Project(
                name=f"random {seed}",
                durations=tuple(unit * random.choice((0, 1, 2, 5, 9)) for _ in range(num)),
                demands=tuple(tuple(random.choice((0, random.randint(0, c))) for c in capacities) for _ in range(num)),
                preds=tuple(tuple(p for p in range(a) if random.random() < 0.15) for a in range(num)),
                capacities=capacities,
            ),
        )


def test_a_list_becomes_the_schedule_that_the_plain_method_makes_of_it_in_both_directions() -> None:
    for random, project in _random_projects():
        search = GeneticSearch(project)
        for preds, is_backward in ((project.preds, False), (project.succs(), True)):
            order = _topological(random, preds)
            assert search.placed(order, is_backward=is_backward) == _placed(project, preds, order)


def test_a_large_project_arrives_whole() -> None:
    project = _random_project(Random(6), 500)
    assert GeneticSearch(project).placed(range(500)) == _placed(project, project.preds, range(500))


def test_justified_schedules_are_legal_and_never_longer() -> None:
    for random, project in _random_projects():
        order = _topological(random, project.preds)
        assert _checked(project, GeneticSearch(project).justified(order)) <= _makespan(
            project, _placed(project, project.preds, order)
        )


def test_justification_shifts_right_then_left_until_that_does_not_help() -> None:
    lengths = []
    for random, project in (*_random_projects(), *((Random(seed), _hard_project(40)) for seed in range(10))):
        order = listed = _topological(random, project.preds)
        starts = _placed(project, project.preds, order)
        lengths.append([_makespan(project, starts)])
        while lengths[-1][-1] not in lengths[-1][:-1]:
            place = {activity: at for at, activity in enumerate(order)}
            last_first = sorted(order, key=lambda a: (-starts[a] - project.durations[a], -place[a]))
            right = _placed(project, project.succs(), last_first)
            end = _makespan(project, right)
            place = {activity: at for at, activity in enumerate(last_first)}
            order = sorted(order, key=lambda a: (end - right[a] - project.durations[a], -place[a]))
            starts = _placed(project, project.preds, order)
            lengths[-1].append(_makespan(project, starts))
        assert GeneticSearch(project).justified(listed) == starts
    assert max(map(len, lengths)) > 3, "no project needed a second round"


def test_a_search_depends_on_its_seed_and_not_on_how_it_is_sliced() -> None:
    project = _random_project(Random(3), 40)
    whole, sliced, other = (GeneticSearch(project, seed=seed, population=16) for seed in (5, 5, 6))
    whole.run(limit_s=60.0, max_children=500)
    for _ in range(50):
        sliced.run(limit_s=60.0, max_children=10)
    other.run(limit_s=60.0, max_children=500)
    assert whole.best() == sliced.best()
    assert whole.best()[1] != other.best()[1]
    assert _checked(project, whole.best()[1]) == whole.best()[0]


def test_a_search_ends_at_its_target() -> None:
    project = _random_project(Random(4), 12)
    search = GeneticSearch(project)
    assert search.run(limit_s=60.0, target=sum(project.durations)) <= sum(project.durations)


def test_a_schedule_from_elsewhere_is_taken_unless_it_breaks_precedence() -> None:
    project = _random_project(Random(5), 20)
    search = GeneticSearch(project)
    with pytest.raises(ValueError, match="nothing was searched"):
        search.best()
    one_by_one = [sum(project.durations[:activity]) for activity in range(20)]
    search.add(one_by_one)
    assert _checked(project, search.best()[1]) == search.best()[0] <= sum(project.durations)
    for wrong in (one_by_one[::-1], [-1] * 20, [10**6] * 20, one_by_one[:-1]):
        with pytest.raises(ValueError, match=r"precedence|are needed"):
            search.add(wrong)


@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (0, 1, 2, 3, 3), (0, 1, 2, 3, 5), (0, 1, 2, 3, -1), (0, 1)])
def test_what_is_no_topological_list_is_refused(tmp_path: Path, order: tuple[int, ...]) -> None:
    search = GeneticSearch(read_sm(_written(tmp_path)))
    with pytest.raises(ValueError, match=r"topological|are needed"):
        search.placed(order)
    with pytest.raises(ValueError, match=r"topological|are needed"):
        search.justified(order)


@pytest.mark.parametrize(
    ("project", "words"),
    [
        (
            Project(name="long", durations=(1 << 23, 1), demands=((), ()), preds=((), ()), capacities=()),
            "periods in all",
        ),
        (
            Project(name="wide", durations=(1,), demands=((0,),), preds=((),), capacities=(1 << 62,)),
            "units of a resource",
        ),
        (Project(name="many", durations=(1,), demands=((0,) * 65,), preds=((),), capacities=(1,) * 65), "65 resources"),
    ],
)
def test_projects_beyond_the_limits_of_the_search_are_refused(project: Project, words: str) -> None:
    with pytest.raises(JobError, match=words):
        GeneticSearch(project)


def test_the_solver_finds_and_proves_what_enumeration_finds() -> None:
    pytest.importorskip("ortools", reason="needs the extra plan (ortools)")
    from lagom_overlap.plan.rcpsp.solve import solve

    for seed in range(6):
        project = _random_project(Random(seed), 4)
        solution = solve(project, 10.0)
        shortest = _shortest_by_enumeration(project)
        assert lower_bound(project) <= shortest
        assert solution.makespan == solution.lower_bound == shortest


def _hard_project(num: int = 90) -> Project:
    """Long activities that need much of three resources: no bound is met, no proof comes within seconds."""
    random = Random(7)
    return Project(
        name="hard",
        durations=tuple(random.randint(1, 10) for _ in range(num)),
        demands=tuple(tuple(random.randint(0, 10) for _ in range(3)) for _ in range(num)),
        preds=tuple(tuple(p for p in range(max(0, a - 15), a) if random.random() < 0.1) for a in range(num)),
        capacities=(14, 15, 16),
    )


def test_a_second_search_takes_over_where_there_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ortools", reason="needs the extra plan (ortools)")
    from lagom_overlap.plan.rcpsp import solve as module

    seeds = []

    class Recorded(GeneticSearch):
        def __init__(self, project: Project, *, seed: int, population: int) -> None:
            seeds.append(seed)
            super().__init__(project, seed=seed, population=population)

    monkeypatch.setattr(module, "GeneticSearch", Recorded)
    project = _hard_project()
    solution = module.solve(project, 0.5, seed=3)
    assert seeds == [3, 4]
    assert lower_bound(project) <= solution.lower_bound < solution.makespan == _checked(project, solution.starts)


def test_ctrl_c_ends_the_solver_with_what_it_has() -> None:
    pytest.importorskip("ortools", reason="needs the extra plan (ortools)")
    from lagom_overlap.plan.rcpsp.solve import solve

    with ended_by_ctrl_c():
        Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        solution = solve(_hard_project(), 10_000.0)
    assert _checked(_hard_project(), solution.starts) == solution.makespan


def test_capacities_of_many_bits_do_not_run_into_each_other() -> None:
    wide = replace(_random_project(Random(1), 8), capacities=(1 << 40, 1), demands=((1 << 39, 1),) * 8)
    starts = GeneticSearch(wide).placed(range(8))
    assert _checked(wide, starts) == sum(wide.durations)  # one at a time on the second


@pytest.mark.parametrize("scale", [1, 10**12])
def test_work_between_a_common_head_and_a_common_tail_bounds_the_makespan(scale: int) -> None:
    # One first (2), then three that need all (1 each), then one last (1): 2 + 3 + 1, though no path is longer than 4.
    project = Project(
        name="hourglass",
        durations=(2, 1, 1, 1, 1),
        demands=((0,), (4 * scale,), (4 * scale,), (4 * scale,), (0,)),
        preds=((), (0,), (0,), (0,), (1, 2, 3)),
        capacities=(4 * scale,),
    )
    assert lower_bound(project) == _shortest_by_enumeration(project) == 6


def test_bounds_never_exceed_a_schedule() -> None:
    for _, project in _random_projects():
        search = GeneticSearch(project)
        search.run(limit_s=60.0, max_children=30)
        assert lower_bound(project) <= search.best()[0]
