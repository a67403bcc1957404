"""Megatron's switches one by one, on jobs with and without a pipeline."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.job.plan import PlanRequest, planned, run_plan
from lagom_overlap.job.plan_problem import read_input
from lagom_overlap.report.plan_model import MegatronJson

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


def advised(tmp_path: Path, more: str, planner: str = "megatron") -> tuple[MegatronJson | msgspec.UnsetType, str]:
    path = tmp_path / "job.toml"
    path.write_text(JOB + more)
    result = run_plan(read_input(path), PlanRequest(planner=planner))
    return result.json.megatron, " ".join(result.view.notes)


def test_a_pipeline_is_planned_by_stage_and_its_transfers_are_advised(tmp_path: Path) -> None:
    found, notes = advised(tmp_path, "pipeline = 4\nzero_stage = 1\nglobal_batch = 16\n")
    assert isinstance(found, MegatronJson)
    assert (found.scale, found.num_gpus, found.is_contended) == ("small", 16, True)
    assert found.step_s < found.without_overlap_s
    assert "--nccl-ub" not in found.arguments  # parameters are whole in backward: no Megatron-FSDP
    pipeline = found.pipeline
    assert pipeline is not None
    assert (pipeline.num_micro_batches, pipeline.wanted_micro_batches) == (8, 16)
    assert pipeline.bubble == pytest.approx(3 / 8)
    assert pipeline.backward_s == pytest.approx(2 * pipeline.forward_s, rel=0.15)
    first = pipeline.switches[0]
    assert first.switch.startswith("--num-layers-per-virtual-pipeline-stage")
    assert first.without_s / first.with_s > 1
    assert "one stage of 4 with 8 layers" in notes


def test_registered_buffers_are_advised_where_parameters_are_sharded(tmp_path: Path) -> None:
    found, _ = advised(tmp_path, "zero_stage = 3\nglobal_batch = 4\n")
    assert isinstance(found, MegatronJson)
    assert "--nccl-ub" in found.arguments
    assert found.pipeline is None


def test_other_planners_advise_no_switches(tmp_path: Path) -> None:
    found, _ = advised(tmp_path, "zero_stage = 1\n", planner="program_order")
    assert found is msgspec.UNSET


def test_stages_hold_equally_many_layers(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"parallel\.pipeline is 5, must divide the 32 layers of phi-2"):
        advised(tmp_path, "pipeline = 5\n")


@pytest.mark.parametrize(("options", "may_cut"), [({}, False), ({"split": True}, True)])
def test_programs_on_cpu_ranks_are_cut_only_if_asked(tmp_path: Path, options: dict[str, bool], may_cut: bool) -> None:
    path = tmp_path / "job.toml"
    path.write_text(JOB + "zero_stage = 3\nglobal_batch = 8\n")
    given = replace(read_input(path), is_on_cores=True, options=options, planner="ours")
    assert any("Operators are not cut" in note for note in planned(given, "ours").plan.notes) is not may_cut
