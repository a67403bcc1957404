"""`[parallel] auto` and ZeRO-1 and -2 in a job file: captured, planned, refused with one line."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("ortools", reason="needs the extra plan")

from lagom_overlap.capturing.file import read_capture
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.planners.predict import predict
from lagom_overlap.verbs.capture import CaptureRequest, run_capture
from lagom_overlap.verbs.plan_problem import read_input
from lagom_overlap.workload.models import load_model

pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOB = """
[job]
name = "searched"
[model]
name = "phi-2"
seq_len = 128
[cluster]
preset = "a100_dgx"
"""


@pytest.fixture(autouse=True)
def _one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def shallow(name: str) -> object:
        return replace(load_model(name), num_layers=1)

    monkeypatch.setattr("lagom_overlap.capturing.models.named.load_model", shallow)


def job(tmp_path: Path, parallel: str, more: str = "") -> Path:
    path = tmp_path / "job.toml"
    path.write_text(f"{JOB}[parallel]\n{parallel}\n{more}", encoding="utf-8")
    return path


def test_a_searched_sharding_is_captured_and_read_again(tmp_path: Path) -> None:
    out = tmp_path / "step.json.gz"
    result = run_capture(CaptureRequest(target=str(job(tmp_path, "auto = [4]")), out=out))
    assert (result.name, result.num_ranks) == ("phi-2-auto4", 4)
    assert any("Sharding found by search over a mesh of 4 ranks (proved cheapest)" in note for note in result.notes)
    again = read_capture(out)
    assert len(again.iteration.ops) == result.num_ops
    assert again.iteration.is_dataflow


def test_a_job_with_a_mesh_is_planned_from_the_sharding_found(tmp_path: Path) -> None:
    given = read_input(job(tmp_path, "auto = [4]"))
    assert given.num_ranks == 4
    assert predict(given.problem).overlap.makespan_s > 0
    assert set(given.problem.groups) == {"mesh"}


def test_zero_stage_2_is_captured_with_reduce_scatters_and_gathered_parameters(tmp_path: Path) -> None:
    out = tmp_path / "step.json.gz"
    run_capture(CaptureRequest(target=str(job(tmp_path, "data = 4\nzero_stage = 2")), out=out))
    comms = read_capture(out).iteration.comms
    moved = {kind: sum(c.collective.num_bytes for c in comms if c.collective.kind is kind) for kind in CollectiveKind}
    head_bytes = 2 * 2560 * 51200
    assert moved[CollectiveKind.REDUCE_SCATTER] >= head_bytes  # of its gradient
    assert moved[CollectiveKind.ALL_GATHER] >= 2 * head_bytes  # of the new head and embedding
    assert moved[CollectiveKind.ALL_TO_ALL] == 0


@pytest.mark.parametrize(
    ("parallel", "more", "match"),
    [
        ("auto = [4]\ntensor = 2", "", "parallel.tensor has no meaning with it"),
        ("auto = [1]", "", "auto"),
        ("auto = [2, 2, 2]", "", "auto"),
        ("auto = [4]", '[plan]\nmemory_limit = "1 MiB"', r"memory_limit is 1\.0 MB: the leanest sharding"),
        ("data = 4\nzero_stage = 1\ntensor = 2", "", "parallel.tensor must be 1"),
    ],
)
def test_what_cannot_be_searched_is_said_in_one_line(tmp_path: Path, parallel: str, more: str, match: str) -> None:
    request = CaptureRequest(target=str(job(tmp_path, parallel, more)), out=tmp_path / "x.json")
    with pytest.raises(JobError, match=match) as found:
        run_capture(request)
    assert "\n" not in str(found.value)


def test_other_verbs_refuse_a_mesh_by_name(tmp_path: Path) -> None:
    spec = read_job(job(tmp_path, "auto = [4]"))
    assert spec.parallel is not None
    with pytest.raises(
        JobError, match=r"parallel\.auto: a sharding is searched for by `lagom capture` and `lagom plan`"
    ):
        spec.parallel.layout()


def test_a_flag_without_a_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"auto needs a machine .* give a job file"):
        run_capture(CaptureRequest(target="phi-2", out=tmp_path / "x.json", parallel="auto=4"))
