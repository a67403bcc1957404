"""The overlap groups of a pipeline, and what settings of them do to its iteration."""

import tomllib

import pytest

from lagom_overlap.collective import CommConfig
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.jobfile.whole_step import WholeStep
from lagom_overlap.tuners.base import Problems
from lagom_overlap.workload import OverlapGroup, find_overlap_groups
from lagom_overlap.workload.ops import CommOp

JOB = """
[job]
name = "x"
[model]
name = "llama-2-7b"
seq_len = 2048
[cluster]
preset = "h100_dgx"
[parallel]
framework = "megatron"
tensor = 2
sequence_parallel = true
pipeline = 4
data = 2
zero_stage = 1
overlap_gradients = true
micro_batch = 1
global_batch = 10
"""
FEW = CommConfig(num_channels=2)


def job(text: str = JOB) -> Job:
    return Job(parse_job(tomllib.loads(text), "job"))


def problems_of(given: Job) -> Problems:
    backend = given.open("simulated", given.request())
    return tuple(backend.problem(group) for group in given.groups)


def key_of(group: OverlapGroup) -> object:
    calls = tuple((op.communicator, op.collective) for op in group.comms)
    return tuple(op.work for op in group.computations), calls, group.starts_after


def counts_written_out(given: Job, stage: int) -> dict[object, int]:
    """How often each group occurs in a stage's step with every micro-batch in it."""
    assert given.step is not None
    step = given.step.simulator.step(stage, given.step.layout.num_micro_batches)
    return {key_of(group): group.count for group in find_overlap_groups(step.issued)}


@pytest.mark.parametrize("layers", ["", 'pipeline_layout = "Et*5|t*9|t*9|t*9L"\n'])
def test_a_group_of_every_stage_is_there_once_and_counted_as_often_as_a_rank_runs_it(layers: str) -> None:
    """As often as in the stage that has it most: in the second job the first stage has the fewest layers."""
    given = job(JOB + layers)
    assert given.step is not None
    assert given.step.simulator.stages == (0, 1, 3)  # the third is like the second
    names = [group.name for group in given.groups]
    assert len(set(names)) == len(names)
    assert {stage for staged in given.staged for stage in staged.places} == {0, 1, 3}
    written = {stage: counts_written_out(given, stage) for stage in (0, 1, 3)}
    for staged in given.staged:
        what = key_of(staged.group)
        assert staged.group.count == max(written[stage][what] for stage in staged.places)
    assert any(staged.group.count > 10 for staged in given.staged)  # of several micro-batches


def test_settings_of_groups_are_those_of_their_calls_in_every_stage() -> None:
    given = job()
    step, whole = given.step, WholeStep.of(given, "simulated")
    assert step is not None
    assert whole is not None
    assert whole.untouched_s == step.times.iteration_s == step.simulator.times_at({}).iteration_s
    found = {problem.group.name: (FEW,) * len(problem.group.comms) for problem in problems_of(given)}
    placed = {
        stage: {place: FEW for staged in given.staged for places in staged.places.get(stage, ()) for place in places}
        for stage in step.simulator.stages
    }
    changed_s = whole.seconds(problems_of(given), found)
    assert changed_s == step.simulator.times_at(placed).iteration_s != whole.untouched_s


@pytest.mark.parametrize("first", [0, 1, 3])
def test_what_is_set_at_a_place_is_what_is_set_by_its_name_where_every_operator_is_written_out(first: int) -> None:
    """Of one stage, which can be simulated by itself."""
    step = job(JOB.replace("global_batch = 10", "global_batch = 2").replace("pipeline = 4", "pipeline = 1")).step
    assert step is not None
    issued = step.simulator.step(0)
    places = [place for place, op in enumerate(issued.iteration.ops) if isinstance(op, CommOp)][first :: first + 2]
    by_name = step.simulator.price.simulator(issued.iteration, waits=issued.waits)
    wanted_s = by_name.makespan_s({issued.iteration.ops[place].name: FEW for place in places})
    assert step.simulator.times_at({0: dict.fromkeys(places, FEW)}).iteration_s == pytest.approx(wanted_s, rel=1e-12)
    assert wanted_s != by_name.makespan_s({})


def test_every_call_set_at_its_place_is_every_call_set_by_what_it_is() -> None:
    """`simulate` sets a collective wherever it is called; here the same calls, one by one."""
    step = job().step
    assert step is not None
    wanted = {op.collective for op in step.simulator.step(1).iteration.comms if op.communicator == "tp"}
    placed = {}
    for stage in step.simulator.stages:
        ops = step.simulator.step(stage).iteration.ops
        placed[stage] = {
            place: FEW for place, op in enumerate(ops) if isinstance(op, CommOp) and op.collective in wanted
        }
    by_kind = step.simulator.times(lambda collective: FEW if collective in wanted else None)
    assert step.simulator.times_at(placed) == by_kind
    assert by_kind.iteration_s != step.times.iteration_s


def test_a_group_of_one_stage_changes_that_stage_alone() -> None:
    given = job()
    step = given.step
    assert step is not None
    last = next(staged for staged in given.staged if set(staged.places) == {3})
    at = {3: {place: FEW for places in last.places[3] for place in places}}
    before, after = step.times, step.simulator.times_at(at)
    assert [stage.compute_s for stage in after.stages[:3]] == [stage.compute_s for stage in before.stages[:3]]
    assert after.stages[3] != before.stages[3]


def test_a_pipeline_of_one_stage_has_no_staged_groups() -> None:
    given = job(JOB.replace("pipeline = 4", "pipeline = 1"))
    assert given.staged == ()
    assert given.groups
    assert given.issued is not None


def test_one_ranks_step_of_a_pipeline_is_asked_for_in_vain() -> None:
    with pytest.raises(
        JobError, match=r"parallel\.pipeline is 4, must be 1: the ranks of a pipeline run different steps"
    ):
        _ = job().issued
