"""A plan made with work is the same however slow the machine is, under every planner that searches."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import ModuleType

import msgspec
import pytest
from ortools.sat.python import cp_model
from random_graphs import fsdp_problem, random_graph

from lagom_overlap.planners import deadline as deadline_module
from lagom_overlap.planners.base import OpTimes, Plan, Planner, PlanProblem
from lagom_overlap.planners.centauri.planner import Centauri
from lagom_overlap.planners.concerto.planner import Concerto
from lagom_overlap.planners.deadline import STEPS_PER_S, Deadline, SearchBudget
from lagom_overlap.planners.memory import with_memory
from lagom_overlap.planners.ours import Ours
from lagom_overlap.planners.schedule import task_graph
from lagom_overlap.planners.schedule.generation import Kind, ScheduleGeneration
from lagom_overlap.planners.schedule.incumbent import Incumbent
from lagom_overlap.planners.schedule.window_search import WindowSearch, race
from lagom_overlap.workload import Op
from lagom_overlap.workload.rewrite.tables import table_of

PLANNERS: dict[str, Planner] = {
    "ours": Ours(),
    "ours, uncut": Ours(split=False),
    "concerto": Concerto(),
    "centauri": Centauri(),
}
SIZES = {"solved whole": 6, "by windows": 24}


@dataclass(frozen=True, slots=True)
class Stretched:
    """The times of an operator for all that rewrites make of it, a little less for each letter of its name."""

    times: OpTimes

    def seconds(self, op: Op) -> float:
        whole = replace(op, name=re.split("[#/+]|[.](?:rs|ag)[.]", op.name)[0])
        return self.times.seconds(whole) * 0.9 ** (len(op.name) - len(whole.name))


def tables(plan: Plan) -> bytes:
    """All of a plan that is written to plan.toml, with what it says of itself."""
    return msgspec.json.encode([[table_of(rewrite) for rewrite in plan.rewrites], plan.notes])


def worked(num_layers: int, million_steps: float = 1.5, **fields: object) -> PlanProblem:
    problem = fsdp_problem(num_layers, prefetch=2, work=SearchBudget(million_steps, **fields))  # type: ignore[arg-type]
    return replace(problem, times=Stretched(problem.times))


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every call of the library and of CP-SAT take longer by an amount that nobody knows, and the clock jump."""
    random = Random(5)

    def delayed(owner: type | ModuleType, name: str) -> None:
        whole = getattr(owner, name)

        def late(*args: object, **kwargs: object) -> object:
            time.sleep(random.uniform(0.0, 0.01))
            return whole(*args, **kwargs)

        monkeypatch.setattr(owner, name, late)

    def slow() -> None:
        delayed(ScheduleGeneration, "improved")
        delayed(WindowSearch, "swept")
        delayed(cp_model.CpSolver, "solve")
        monkeypatch.setattr(deadline_module, "monotonic", lambda: 50.0 * time.monotonic())

    return slow


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PLANNERS)
def test_a_slowed_machine_finds_the_same_plan_with_the_same_work(name, size, slow_machine):
    problem = worked(SIZES[size], 0.5)
    quick = PLANNERS[name].plan(problem)
    slow_machine()
    assert tables(PLANNERS[name].plan(problem)) == tables(quick)


def test_more_work_finds_no_worse_plan_and_says_how_much_was_done():
    spans = []
    for million_steps in (0.02, 0.2, 2.0):
        plan = Ours(split=False).plan(worked(24, million_steps))
        spans.append(Ours(split=False).replan(worked(24, 0.001), plan).notes[0])
        (said,) = [note for note in plan.notes if note.startswith("work: ")]
        done, whole = (float(said.split()[place]) for place in (1, 3))
        assert whole == million_steps
        assert 0 < done < whole + 2.0  # the last call may end behind it
        assert "the same step and work give the same plan" in said
    ratios = [float(said.split()[3]) for said in spans]  # The schedule takes X times ...
    assert ratios == sorted(ratios, reverse=True)


def test_the_clock_ends_work_only_where_asked_and_the_plan_says_so(monkeypatch):
    ticking = iter(range(10**9))
    monkeypatch.setattr(deadline_module, "monotonic", lambda: 1e6 * next(ticking))
    plan = Ours(split=False).plan(worked(24, 1e6, limit_s=0.02))
    assert any("another run may find another plan" in note for note in plan.notes)
    assert not any("another run" in note for note in Ours(split=False).plan(worked(6)).notes)


def test_hashes_of_names_do_not_reach_the_plan():
    def made(seed: str) -> bytes:
        script = (
            "import sys; from random_graphs import fsdp_problem; import test_work_budget as t\n"
            "for name, planner in t.PLANNERS.items(): sys.stdout.buffer.write(t.tables(planner.plan(t.worked(8, 0.2))))"
        )
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        return subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True).stdout

    here = b"".join(tables(planner.plan(worked(8, 0.2))) for planner in PLANNERS.values())
    assert len(here) > 1000
    assert made("2" if os.environ.get("PYTHONHASHSEED") == "1" else "1") == here


def test_a_race_on_two_threads_does_its_parts_of_the_work_and_no_more():
    problem, work = fsdp_problem(40), SearchBudget(0.4)
    graph = with_memory(task_graph(problem), problem.iteration, depth=2, limit_bytes=None)
    generation = ScheduleGeneration(graph)
    random = Random(7)
    starts = [generation.schedule(Kind.SERIAL, [random.random() for _ in graph.names]) for _ in range(4)]
    found = []
    for _ in range(4):
        ends = Deadline.of_work(work)
        incumbent = Incumbent(1, ends)
        race(graph, starts, incumbent, deadline=ends)
        found.append((incumbent.best, ends.elapsed_s * STEPS_PER_S))
    assert found == [found[0]] * 4
    best, steps = found[0]
    assert best.makespan < min(start.makespan for start in starts)
    assert 0.95e6 * work.million_steps < steps < 1.1e6 * work.million_steps


def test_work_counts_what_the_library_placed():
    graph = random_graph(Random(1), 50)
    generation = ScheduleGeneration(graph)
    ends = Deadline.of_work(SearchBudget(1.0))
    made = generation.schedule(Kind.SERIAL, range(50), deadline=ends)
    generation.improved(made, max_rounds=1, deadline=ends)
    assert ends.elapsed_s * STEPS_PER_S == pytest.approx(50 + 2 * 50)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_work_must_be_positive_and_finite(wrong):
    with pytest.raises(ValueError, match="million steps"):
        SearchBudget(wrong)
    with pytest.raises(ValueError, match="limit is"):
        SearchBudget(1.0, wrong)


def test_work_of_searches_at_once_counts_when_they_are_joined_and_each_gets_its_part_of_what_is_left() -> None:
    whole = Deadline.of_work(SearchBudget(8.0))
    whole.spend(2e6)
    parts = whole.parts(3)
    assert [part.left_steps for part in parts] == [2_000_000] * 3
    for part, steps in zip(parts, (1e6, 2e6, 0.5e6), strict=True):
        part.spend(steps)
    assert [part.left_steps for part in parts] == [1_000_000, 0, 1_500_000]
    assert whole.left_steps == 6_000_000  # not told of it yet
    whole.join(parts)
    assert whole.left_steps == 2_500_000
    assert whole.remarks() == ("work: 5.5 of 8 million steps; the same step and work give the same plan",)
