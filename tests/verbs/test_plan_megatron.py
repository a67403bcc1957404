"""Megatron's switches one by one, on jobs with and without a pipeline."""

from dataclasses import replace
from pathlib import Path

import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.export.tp_overlap import tp_overlap_yaml
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.spec import read_job
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.effects import MIN_GAIN, SwitchAdvice
from lagom_overlap.planners.megatron.flags import MegatronFlags, TensorOverlap
from lagom_overlap.planners.simulated import simulated
from lagom_overlap.planners.times import ModelTimes
from lagom_overlap.results.plan import MegatronEffects
from lagom_overlap.verbs.plan import PlanRequest, planned, run_plan
from lagom_overlap.verbs.plan_megatron import EXPERTS_SWITCH, UNTRIED, megatron_lines, megatron_plan
from lagom_overlap.verbs.plan_problem import PLAIN_PIPELINE, read_input
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate
from lagom_overlap.workload import CommOp, CompOp, Iteration, MemoryBound

JOB = """
[job]
name = "phi"
[model]
name = "phi-2"
seq_len = 1024
[cluster]
preset = "a100_dgx"
[parallel]
tensor = 2
data = 2
sequence_parallel = true
"""


def advised(tmp_path: Path, more: str, planner: str = "megatron") -> tuple[MegatronEffects | None, str]:
    path = tmp_path / "job.toml"
    path.write_text(JOB + more)
    result = run_plan(read_input(path), PlanRequest(planner=planner))
    return result.megatron, " ".join(result.notes)


def test_a_pipeline_is_planned_by_stage_and_its_transfers_are_advised(tmp_path: Path) -> None:
    found, notes = advised(tmp_path, "pipeline = 4\nzero_stage = 1\nglobal_batch = 16\n")
    assert isinstance(found, MegatronEffects)
    assert (found.scale, found.num_gpus, found.is_contended) == ("small", 16, True)
    assert found.step_s < found.without_overlap_s
    assert "--use-nccl-ub" not in found.arguments  # parameters are whole in backward: no Megatron-FSDP
    pipeline = found.pipeline
    assert pipeline is not None
    assert (pipeline.check.num_micro_batches, pipeline.check.wanted_micro_batches) == (8, 16)
    assert pipeline.check.bubble == pytest.approx(3 / 8)
    assert pipeline.slot.backward_s == pytest.approx(2 * pipeline.slot.forward_s, rel=0.15)
    first = pipeline.switches[0]
    assert first.switch.startswith("--num-layers-per-virtual-pipeline-stage")
    assert first.without_s / first.with_s > 1
    assert "one micro-batch through the first of 4 stages" in notes


def test_registered_buffers_are_advised_where_parameters_are_sharded(tmp_path: Path) -> None:
    found, _ = advised(tmp_path, "zero_stage = 3\nglobal_batch = 4\n")
    assert isinstance(found, MegatronEffects)
    assert "--use-nccl-ub" in found.arguments
    assert found.pipeline is None


def test_the_advice_holds_no_switch_that_is_predicted_to_lose(tmp_path: Path) -> None:
    found, _ = advised(tmp_path, "zero_stage = 1\nglobal_batch = 4\n")
    assert isinstance(found, MegatronEffects)
    lines = "\n".join(megatron_lines(found))
    for one in found.not_advised:
        assert one.switch not in found.arguments
        assert f"{one.switch}: not advised" in lines
        assert one.gain <= MIN_GAIN
        assert one.without_s == found.step_s
    for one in found.switches:
        assert f"{one.switch}: not advised" not in lines  # it is among the arguments
        assert one.gain > MIN_GAIN or f"{one.switch}: " in lines


def test_a_switch_that_another_needs_is_said_to_be_kept_for_it(tmp_path: Path) -> None:
    found, _ = advised(tmp_path, "zero_stage = 1\nglobal_batch = 4\n")
    assert isinstance(found, MegatronEffects)
    little = SwitchAdvice(switch="--overlap-grad-reduce", without_s=1.007, with_s=1.0)
    both = replace(found, arguments=("--overlap-grad-reduce", "--overlap-param-gather"), switches=(little,))
    assert "   +0.7% --overlap-grad-reduce: --overlap-param-gather needs it" in megatron_lines(both)


def test_sequence_parallelism_is_predicted_on_its_own_step_and_advised_if_it_gains(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("sequence_parallel = true\n", "zero_stage = 1\nglobal_batch = 4\n"))
    result = run_plan(read_input(path), PlanRequest(out=tmp_path / "run"))
    assert (result.carrier, result.planner) == ("megatron", "megatron")
    found = result.megatron
    assert found is not None
    row = next(one for one in (*found.switches, *found.not_advised) if one.switch == "--sequence-parallel")
    assert ("--sequence-parallel" in found.arguments) == (row.gain > MIN_GAIN)
    assert result.iteration_s.after == found.step_s < result.iteration_s.before
    assert found.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    written = (tmp_path / "run" / "megatron_args.sh").read_text()
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in written
    assert f'MEGATRON_OVERLAP_ARGS="{" ".join(found.arguments)}"' in written
    applied = run_plan(read_input(path), PlanRequest(apply=tmp_path / "run" / "plan.toml"))
    assert applied.megatron is not None
    assert applied.megatron.arguments == found.arguments


def test_an_applied_plan_with_sequence_parallelism_is_predicted_on_the_step_that_has_it(tmp_path: Path) -> None:
    """The figure is that of the same switches in a job that asks for sequence parallelism itself."""
    path, with_it = tmp_path / "job.toml", tmp_path / "with.toml"
    with_it.write_text(JOB + "zero_stage = 1\nglobal_batch = 4\n")
    path.write_text(with_it.read_text().replace("sequence_parallel = true\n", ""))
    run_plan(read_input(path), PlanRequest(out=tmp_path / "run"))
    plan = tmp_path / "run" / "plan.toml"
    head, _, _ = plan.read_text().partition("[megatron]")
    plan.write_text(f"{head}[megatron]\nsequence_parallel = true\n")
    applied = run_plan(read_input(path), PlanRequest(apply=plan))
    given = read_input(with_it)
    other = megatron_plan(given.problem, given.num_ranks, wanted=MegatronFlags())
    assert applied.iteration_s.after == other.step.makespan_s
    assert applied.megatron is not None
    assert "--sequence-parallel" in applied.megatron.arguments
    row = next(one for one in applied.megatron.switches if one.switch == "--sequence-parallel")
    assert row.with_s == applied.iteration_s.after != row.without_s


def test_sequence_parallelism_of_a_step_without_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("tensor = 2\n", "").replace("sequence_parallel = true\n", "zero_stage = 1\n"))
    run_plan(read_input(path), PlanRequest(out=tmp_path / "run"))
    plan = tmp_path / "run" / "plan.toml"
    plan.write_text(plan.read_text().replace("sequence_parallel = false", "sequence_parallel = true"))
    with pytest.raises(JobError, match="cannot be predicted with sequence parallelism"):
        run_plan(read_input(path), PlanRequest(apply=plan))


def test_a_spent_budget_leaves_switches_untried_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB + "zero_stage = 1\nglobal_batch = 4\n")
    given = read_input(path)
    whole = megatron_plan(replace(given.problem, work=SearchBudget(40)), given.num_ranks)
    cut = megatron_plan(replace(given.problem, work=SearchBudget(1e-6)), given.num_ranks)
    assert UNTRIED in cut.plan.notes
    assert UNTRIED not in whole.plan.notes
    assert whole.effects.switches
    assert not cut.effects.switches
    assert whole.step.makespan_s <= cut.step.makespan_s


def test_megatrons_own_step_and_its_switches_are_simulated_alike(tmp_path: Path) -> None:
    """The job's own switches as rules give the built step, within a thousandth."""
    path = tmp_path / "job.toml"
    path.write_text(JOB + "zero_stage = 1\nglobal_batch = 4\noverlap_gradients = false\n")
    given = read_input(path)
    own = MegatronFlags(overlap_grad_reduce=False, overlap_param_gather=False)
    made = megatron_plan(given.problem, given.num_ranks, wanted=own)
    assert made.step.makespan_s == pytest.approx(simulated(given.problem, given.issued).makespan_s, rel=2e-3)


def test_tensor_parallel_overlap_has_its_file_and_several_connections_where_experts_overlap() -> None:
    flags = MegatronFlags(tensor_overlap=TensorOverlap.PIPELINED, tensor_splits=8)
    comm = CommOp(
        name="a", collective=Collective(CollectiveKind.REDUCE_SCATTER, 1 << 20, 8), communicator="tp", stream="comm"
    )
    iteration = Iteration("step", (CompOp(name="b", work=MemoryBound(8)), comm), is_dataflow=True)
    cluster = load_preset("h100_dgx", 1)
    problem = PlanProblem(
        iteration=iteration, cluster=cluster, times=ModelTimes(ContentionModel(cluster, load_profile("plausible")))
    )
    text = tp_overlap_yaml(problem, flags).decode()
    products = [line.removesuffix(":") for line in text.splitlines() if line.endswith(":")]
    assert sorted(products) == sorted(
        f"{layer}_{phase}" for layer in ("qkv", "proj", "fc1", "fc2") for phase in ("fprop", "dgrad", "wgrad")
        if (layer, phase) not in (("proj", "wgrad"), ("fc2", "wgrad"))
    )  # fmt: skip
    assert "fc2_fprop:\n  method: pipeline\n  num_sm: 5\n  num_splits: 8\n" in text
    one, several = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert flags.environment(has_tensor=True, is_blackwell=False) == one
    assert flags.environment(has_tensor=True, is_blackwell=True) == {}
    assert MegatronFlags(overlap_experts=True).environment(has_tensor=True, is_blackwell=False) == several
    assert MegatronFlags(megatron_fsdp=True).environment(has_tensor=True, is_blackwell=False) == {}


def test_other_planners_advise_no_switches(tmp_path: Path) -> None:
    found, _ = advised(tmp_path, "zero_stage = 1\n", planner="program_order")
    assert found is None


def test_stages_hold_equally_many_layers(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"pipeline x chunks = 6 x 1 = 6, must divide the model's layers \(32\)"):
        advised(tmp_path, "pipeline = 6\n")


@pytest.mark.parametrize(("options", "may_cut"), [({}, False), ({"split": True}, True)])
def test_programs_on_cpu_ranks_are_cut_only_if_asked(tmp_path: Path, options: dict[str, bool], may_cut: bool) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB + "zero_stage = 3\nglobal_batch = 8\n")
    given = read_input(path)
    brief = replace(given.problem, budget_s=0.5)
    given = replace(given, problem=brief, is_on_cores=True, options=options, planner="ours")
    assert any("Operators are not cut" in note for note in planned(given, "ours").plan.notes) is not may_cut


def test_a_budget_that_making_the_graph_exceeds_still_ends_in_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB + "zero_stage = 3\nglobal_batch = 8\n")
    given = read_input(path)
    hurried = replace(given, problem=replace(given.problem, budget_s=1e-3), options={"split": True}, planner="ours")
    found = planned(hurried, "ours")
    assert found.plan.rewrites
    assert found.after.makespan_s > 0


def test_a_sequence_that_tensor_parallelism_does_not_divide_is_planned_without_that_advice(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    odd = JOB.replace("seq_len = 1024", "seq_len = 1023").replace("sequence_parallel = true\n", "zero_stage = 1\n")
    path.write_text(odd)
    found = run_plan(read_input(path), PlanRequest(planner="megatron")).megatron
    assert isinstance(found, MegatronEffects)
    assert "--sequence-parallel" not in {one.switch for one in (*found.switches, *found.not_advised)}


MIXTURE = """
[job]
name = "mixture"
[model]
name = "mixtral-8x7b"
seq_len = 2048
[cluster]
preset = "h100_dgx"
[parallel]
pipeline = 4
data = 8
expert = 8
zero_stage = 1
global_batch = 64
"""
INTERLEAVED = 'schedule = "interleaved"\nchunks = 4\noverlap_p2p = true\n'


def test_a_pipelines_experts_gain_what_simulate_says_of_the_job_file_with_the_key(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(MIXTURE + INTERLEAVED)
    given = read_input(path)
    assert given.pipeline is not None
    (advice,) = (one for one in given.pipeline.switches if one.switch == EXPERTS_SWITCH)
    simulated_s = []
    for more in ("", "overlap_experts = true\n"):
        path.write_text(MIXTURE + INTERLEAVED + more)
        simulated_s.append(run_simulate(SimulateRequest(job=Job(read_job(path)))).iteration_s)
    assert (advice.without_s, advice.with_s) == tuple(simulated_s)
    assert advice.gain > MIN_GAIN
    for wanted in (None, MegatronFlags(overlap_experts=True)):
        found = megatron_plan(given.problem, given.num_ranks, pipeline=given.pipeline, wanted=wanted)
        assert EXPERTS_SWITCH in found.effects.arguments
        assert found.effects.environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
        assert found.plan.settings == replace(found.plan.settings, overlap_experts=True)  # type: ignore[type-var]


def test_what_a_pipeline_gains_is_said_where_one_stage_alone_gains_nothing(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(MIXTURE + INTERLEAVED)
    notes = run_plan(read_input(path), PlanRequest()).notes
    assert any("the step is left as it is" in note for note in notes)
    assert any(note.endswith(EXPERTS_SWITCH) for note in notes)


def test_a_plain_pipeline_says_why_its_experts_are_not_asked(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(MIXTURE)
    found = run_plan(read_input(path), PlanRequest())
    assert PLAIN_PIPELINE in found.notes
    assert found.megatron is not None
    assert found.megatron.pipeline is not None
    assert EXPERTS_SWITCH not in [one.switch for one in found.megatron.pipeline.switches]
    assert EXPERTS_SWITCH not in found.megatron.arguments


@pytest.mark.parametrize(("framework", "has_it"), [("megatron", True), ("megatron_deepspeed", False)])
def test_overlapped_experts_are_tried_of_the_framework_that_has_them(
    tmp_path: Path, framework: str, *, has_it: bool
) -> None:
    path = tmp_path / "job.toml"
    text = MIXTURE.replace("pipeline = 4", f'framework = "{framework}"').replace("h100_dgx", "gb300")
    path.write_text(text.replace("global_batch = 64", "global_batch = 16"))
    given = read_input(path)
    found = megatron_plan(given.problem, given.num_ranks).effects
    tried = [*found.arguments, *(one.switch for one in (*found.switches, *found.not_advised))]
    assert any(EXPERTS_SWITCH in switch for switch in tried) is has_it
