"""Megatron's switches one by one, on jobs with and without a pipeline."""

from dataclasses import replace
from pathlib import Path

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.results.plan import MegatronEffects
from lagom_overlap.verbs.plan import PlanRequest, planned, run_plan
from lagom_overlap.verbs.plan_megatron import megatron_lines
from lagom_overlap.verbs.plan_problem import read_input

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
    assert "--nccl-ub" not in found.arguments  # parameters are whole in backward: no Megatron-FSDP
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
    assert "--nccl-ub" in found.arguments
    assert found.pipeline is None


def test_the_advice_holds_no_switch_that_is_predicted_to_lose(tmp_path: Path) -> None:
    found, _ = advised(tmp_path, "zero_stage = 1\nglobal_batch = 16\n")
    assert isinstance(found, MegatronEffects)
    assert not any(argument.startswith("--no-async") for argument in found.arguments)
    lines = "\n".join(megatron_lines(found))
    for one in found.not_advised:
        assert one.switch not in found.arguments
        assert f"{one.switch}: not advised" in lines
        assert one.with_s >= one.without_s == found.step_s
    assert all(one.with_s < one.without_s or f"{one.switch}: not advised" in lines for one in found.switches)


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
    given = replace(read_input(path), is_on_cores=True, options=options, planner="ours")
    assert any("Operators are not cut" in note for note in planned(given, "ours").plan.notes) is not may_cut
