"""A plan against its program on ranks: what is reported, what is not, and what is kept when the run fails."""

import json
from dataclasses import dataclass, replace

import pytest

from lagom_overlap.cli import main
from lagom_overlap.engines.fx.commands import ArmRuns, PlanRun
from lagom_overlap.errors import WrongResultError
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.simulated import Simulation, simulated
from lagom_overlap.verbs.plan import Planned, PlanRequest, offered, run_plan
from lagom_overlap.verbs.plan_problem import PlanInput
from lagom_overlap.verbs.plan_run import MAX_ERROR
from lagom_overlap.workload import CompOp, Gemm, Iteration
from lagom_overlap.workload.rewrite.steps import Reorder


class Times:
    def seconds(self, op):
        return 1e-3


@dataclass
class Ranks:
    """Two runs of the program take 2 s, of the plan 1 s."""

    max_error: float
    description: str = "ranks of a test"

    def run(self, rewrites, *, rounds, seed, graph):
        before, after = ArmRuns((2.0, 2.0), (0.0, 0.0), ()), ArmRuns((1.0, 1.0), (0.0, 0.0), ())
        return PlanRun(before=before, after=after, max_error=self.max_error, order_digest="0")


def small(ranks):
    iteration = Iteration("step", (CompOp(name="a", work=Gemm(8, 8, 8)),), is_dataflow=True)
    problem = PlanProblem(iteration=iteration, cluster=load_preset("a40_nvlink"), times=Times())
    return PlanInput(name="step", problem=problem, issued=iteration, num_ranks=2, ranks=ranks)


def execution(max_error):
    return run_plan(small(Ranks(max_error)), PlanRequest(planner="program_order", execute=True)).execution


def test_outputs_that_rounding_explains_are_reported_with_their_difference():
    found = execution(MAX_ERROR)
    assert (found.max_error, found.is_bitwise_equal, found.speedup.median) == (MAX_ERROR, False, 2.0)
    assert execution(0.0).is_bitwise_equal


@pytest.mark.parametrize("max_error", [0.5, 1e308])
def test_other_outputs_than_the_programs_are_an_error(max_error):
    with pytest.raises(WrongResultError, match="differ from the program's"):
        execution(max_error)


class Watched(Ranks):
    """Ranks that look at the folder when they are asked to run."""

    def run(self, rewrites, *, rounds, seed, graph):
        self.seen = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        if self.stopped_by is not None:
            raise self.stopped_by
        return super().run(rewrites, rounds=rounds, seed=seed, graph=graph)


def watched(folder, stopped_by=None):
    ranks = Watched(0.0)
    ranks.folder, ranks.stopped_by = folder, stopped_by
    return ranks


@pytest.mark.parametrize(
    ("simulation", "is_run", "is_kept"),
    [
        (Simulation.ALONE, False, True),  # nothing says that it loses
        (Simulation.MEASURED, False, False),
        (Simulation.MEASURED, True, True),  # the ranks will tell
        (Simulation.CONTENTION, True, False),
    ],
)
def test_a_plan_that_loses_under_contention_is_offered_only_to_ranks_that_measure_it(simulation, is_run, is_kept):
    given = small(Ranks(0.0))
    other = Iteration("step", (*given.issued.ops, CompOp(name="b", work=Gemm(8, 8, 8))), is_dataflow=True)
    plan = Plan(planner="ours", rewrites=(Reorder(("b", "a")),), iteration=other, lower_bound_s=1e-3)
    before, after = (
        replace(simulated(given.problem, iteration), simulation=simulation) for iteration in (given.issued, other)
    )
    assert after.makespan_s > before.makespan_s
    found = offered(given, Planned(plan=plan, before=before, after=after, solve_s=0.0), is_run=is_run)
    assert (found.plan is plan) is is_kept
    assert is_kept or found.plan.notes[0].startswith("No gain: with contention the plan of ours takes 2.00 ms")


FILES = {"run.json", "plan.toml", "report.html", "timeline.json"}


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt(), WrongResultError("no")])
def test_the_plan_is_written_before_it_is_run_and_stays_when_the_run_does_not_end(tmp_path, stopped_by):
    ranks = watched(tmp_path / "run", stopped_by)
    with pytest.raises(type(stopped_by)):
        run_plan(small(ranks), PlanRequest(planner="program_order", execute=True, out=tmp_path / "run"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == ranks.seen
    assert set(ranks.seen) == FILES
    assert json.loads(ranks.seen["run.json"])["result"]["execution"] is None


def test_what_was_measured_is_added_to_the_folder(tmp_path):
    ranks = watched(tmp_path / "run")
    run_plan(small(ranks), PlanRequest(planner="program_order", execute=True, out=tmp_path / "run"))
    after = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert set(after) == FILES
    assert after["plan.toml"] == ranks.seen["plan.toml"]
    assert json.loads(after["run.json"])["result"]["execution"]["speedup"]["median"] == 2.0
    assert b"on real ranks" not in ranks.seen["report.html"]


def test_ctrl_c_in_the_run_says_where_the_plan_is(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    given = small(watched(folder, KeyboardInterrupt()))
    given.ranks.close = lambda: None
    monkeypatch.setattr("lagom_overlap.cli.plan.read_input", lambda *_: given)
    assert main(["plan", "job.toml", "--planner", "program_order", "--execute", "--out", str(folder)]) == 130
    said = capsys.readouterr().err
    assert said == f"lagom plan: the plan is in {folder}, without a run\nlagom plan: interrupted\n"
    assert {path.name for path in folder.iterdir()} == FILES
