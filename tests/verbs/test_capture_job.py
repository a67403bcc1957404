"""`lagom capture` and jobs on a captured step, end to end; what a user gets wrong ends in one line and code 2."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from lagom_overlap.capturing.file import read_capture, write_capture
from lagom_overlap.capturing.models import named
from lagom_overlap.cli import main
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job, read_job
from lagom_overlap.planners.memory import peak_of_spans
from lagom_overlap.planners.simulated import simulated
from lagom_overlap.verbs.capture import parse_parallel
from lagom_overlap.verbs.compare import CompareRequest, run_compare
from lagom_overlap.verbs.plan import PlanRequest, run_plan
from lagom_overlap.verbs.plan_problem import read_input
from lagom_overlap.verbs.simulate import simulate_capture
from lagom_overlap.verbs.tune import TuneRequest, run_tune
from lagom_overlap.workload import Buffer, CommOp, CompOp, Gemm, Iteration
from lagom_overlap.workload.issued import IssuedStep

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]  # a shared machine may be slow

SCRIPT = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from lagom_overlap.capturing.fake_tensor import TrainingStep


def step():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return TrainingStep(model=model, inputs=(torch.zeros(4, 8),), loss=torch.sum, optimizers=(optimizer,))


def wrong():
    return 3


def by_value():
    model = torch.nn.Linear(4, 4)
    return TrainingStep(model=model, inputs=(torch.zeros(2, 4),), loss=lambda y: y.sum() if (y > 0).any() else -y.sum())


def failing():
    raise KeyError("nothing here")
"""

JOB = """
[job]
name = "captured"
[model]
capture = "step.json.gz"
[cluster]
preset = "a100_dgx"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A script, its capture and a job on it."""
    folder = tmp_path_factory.mktemp("captured")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.toml").write_text(JOB)
    assert main(["capture", f"{folder / 'train.py'}:step", "--ranks", "4", "--out", str(folder / "step.json.gz")]) == 0
    return folder


def test_a_scripts_function_is_captured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "again.json"
    assert main(["capture", f"{folder / 'train.py'}:step", "--ranks", "4", "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    capture = read_capture(out)
    assert printed["num_ops"] == len(capture.iteration.ops)
    assert printed["num_ranks"] == 4
    assert printed["communicators"][0]["name"] == "fsdp"
    assert printed["files"] == [str(out)]
    assert capture == read_capture(folder / "step.json.gz")


def test_a_model_named_in_a_job_file_is_captured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = named.load_model
    monkeypatch.setattr(named, "load_model", lambda name: replace(plain(name), num_layers=1))
    (tmp_path / "job.toml").write_text(
        '[job]\nname = "x"\n[model]\nname = "phi-2"\nseq_len = 8\n[cluster]\npreset = "a100_dgx"\n'
        "[parallel]\nfsdp = 2\nmicro_batch = 1\nglobal_batch = 4\n"
    )
    assert main(["capture", str(tmp_path / "job.toml"), "--out", str(tmp_path / "step.json.gz")]) == 0
    assert "phi-2-fsdp2: rank 0 of 2" in capsys.readouterr().out
    assert {op.origin.microbatch for op in read_capture(tmp_path / "step.json.gz").iteration.ops} == {0, 1}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ranks", "0"], "ranks is 0, must be 1 to"),
        (["--ranks", "4", "--rank", "4"], "rank is 4, must be 0 to ranks - 1 = 3"),
        (["--seq-len", "8"], "--seq-len goes with a named model"),
    ],
)
def test_what_no_capture_of_a_script_has_is_refused_before_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it ran')\n\ndef step():\n    pass\n")
    assert main(["capture", f"{script}:step", *flags, "--out", str(tmp_path / "step.json")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "it ran" not in error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('attention_kernel = "sdpa_flash"', "parallel.attention_kernel: named models are captured without it"),
        ('[precision]\nattention = "mxfp8"', "precision.attention is mxfp8: named models are captured with parameter"),
        ('[precision]\nhead = "mxfp8"', "precision.head is mxfp8: named models are captured with parameter"),
        ('[precision]\nproducts = "fp8"', "precision.products is fp8: named models are captured with parameter"),
    ],
)
def test_a_capture_does_not_leave_out_what_a_job_says_of_attention_and_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    (tmp_path / "job.toml").write_text(
        '[job]\nname = "x"\n[model]\nname = "phi-2"\nseq_len = 8\n[cluster]\npreset = "b200"\n'
        f"[parallel]\nfsdp = 2\n{line}\n"
    )
    assert main(["capture", str(tmp_path / "job.toml"), "--out", str(tmp_path / "step.json.gz")]) == 2
    assert words in capsys.readouterr().err


def test_a_captured_job_is_simulated(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(folder / "job.toml"), "--json", "--out", str(tmp_path / "run")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["capture"] == "train-step"
    given = read_input(read_job(folder / "job.toml"))
    step = simulated(given.problem, given.issued)
    assert 0 < printed["exposed_comm_s"] < printed["iteration_s"] == pytest.approx(step.makespan_s)
    assert printed["exposed_comm_s"] == pytest.approx(step.exposed_s)
    assert printed["peak_memory_bytes"] > read_capture(folder / "step.json.gz").iteration.resident_bytes
    assert (tmp_path / "run" / "timeline.json").exists()
    assert main(["simulate", str(folder / "job.toml")]) == 0
    assert "To choose several settings together: lagom plan" in " ".join(capsys.readouterr().out.split())


def test_a_captured_step_answers_what_the_planner_of_fsdp2_predicts(folder: Path, tmp_path: Path) -> None:
    """The first layer's parameters are gathered again for backward; kept, they are not."""
    spec = read_job(folder / "job.toml")
    result = simulate_capture(Job(spec), tmp_path / "run")
    found = next(answer for answer in result.what_ifs if answer.change.startswith("parameters kept after forward"))
    planned = run_plan(read_input(spec), PlanRequest())
    assert planned.fsdp2 is not None
    told = (*planned.fsdp2.switches, *planned.fsdp2.not_advised)
    kept = next(one for one in told if one.switch == "reshard_after_forward=False for all units")
    assert kept.without_s == pytest.approx(result.iteration_s)  # no other setting gains here
    assert found.gain_s == pytest.approx(kept.without_s - kept.with_s)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Should I change something?" in page
    assert found.change in page
    assert f"{result.num_ops} operators" in page


def test_a_captured_job_has_groups_to_tune(folder: Path) -> None:
    groups = Job(read_job(folder / "job.toml")).groups
    assert {comm.communicator for group in groups for comm in group.comms} == {"fsdp"}


def test_a_capture_that_does_not_fit_is_said_to_in_every_verb(folder: Path, tmp_path: Path) -> None:
    capture = read_capture(folder / "step.json.gz")
    held = replace(capture, iteration=replace(capture.iteration, resident_bytes=10**12))
    write_capture(tmp_path / "step.json.gz", held)
    (tmp_path / "job.toml").write_text((folder / "job.toml").read_text())
    spec = read_job(tmp_path / "job.toml")
    given = read_input(spec)
    step = simulated(given.problem, given.issued)
    notes = [
        simulate_capture(Job(spec), None).notes,
        run_tune(TuneRequest(job=Job(spec), tuner="default", out=tmp_path / "run")).notes,
        run_compare(CompareRequest(job=Job(spec), tuners=("default",))).notes,
        run_plan(given, PlanRequest(planner="program_order")).notes,
    ]
    (said,) = {note for found in notes for note in found if note.startswith("It does not fit: ")}
    assert said == f"It does not fit: {(step.peak_bytes - 84_974_239_744) / 1e9:.1f} GB more than A100-SXM4-80GB has."
    assert all(said in found for found in notes)


def test_a_capture_is_seen_from_the_job_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    spec = msgspec.structs.replace(read_job(folder / "job.toml"), cluster=None)
    assert Job(spec).captured == read_capture(folder / "step.json.gz")


def test_more_ranks_than_gpus_are_refused(folder: Path, tmp_path: Path) -> None:
    capture = read_capture(folder / "step.json.gz")
    big = IssuedStep(iteration=capture.iteration, num_ranks=64, groups=capture.groups, waits=capture.waits)
    write_capture(tmp_path / "step.json.gz", big)
    (tmp_path / "job.toml").write_text(JOB + "nodes = 1\n")
    with pytest.raises(JobError, match="64 ranks do not fit"):
        simulate_capture(Job(read_job(tmp_path / "job.toml")), None)


def test_a_capture_over_more_ranks_than_a_node_is_the_same_step_to_every_verb(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "step.json.gz").write_bytes((folder / "step.json.gz").read_bytes())
    (tmp_path / "job.toml").write_text(JOB + "gpus_per_node = 2\n")  # two nodes of two: no number of nodes is given
    spec = read_job(tmp_path / "job.toml")
    step_s = simulate_capture(Job(spec), None).iteration_s
    assert run_tune(TuneRequest(job=Job(spec), tuner="default", out=tmp_path / "run")).step_s == step_s
    assert run_compare(CompareRequest(job=Job(spec), tuners=("default",))).step_s == step_s
    assert run_plan(read_input(spec), PlanRequest(planner="program_order")).iteration_s.before == step_s


@pytest.mark.parametrize(
    ("target", "more", "words"),
    [
        ("{folder}/train.py:wrong", [], "returned int, must return a TrainingStep"),
        ("{folder}/train.py:by_value", [], "depends on the values of a tensor"),
        ("{folder}/train.py:failing", [], "KeyError: 'nothing here'"),
        ("{folder}/train.py:nobody", [], "has no function 'nobody'"),
        ("{folder}/train.py", [], "give SCRIPT.py:FUNCTION"),
        ("{folder}/nothing.py:step", [], "does not exist"),
        ("{folder}/train.py:step", ["--parallel", "fsdp=2"], "a script says it itself"),
        ("{folder}/train.py:step", ["--ranks", "0"], "ranks is 0"),
        ("{folder}/train.py:step", ["--ranks", "4", "--rank", "4"], "rank is 4, must be 0 to ranks - 1 = 3"),
        ("{folder}/job.toml", [], "names no model to capture"),
        ("lama-3-8b", [], "did you mean 'llama-3-8b'"),
        ("llama-3-8b", ["--parallel", "fsdp"], "'fsdp' is no degree"),
        ("llama-3-8b", ["--parallel", "fsdp=2,fsdp=4"], "fsdp is given twice"),
        ("llama-3-8b", ["--parallel", "fsdp=-2"], "must be a whole number"),
        ("llama-3-8b", ["--ranks", "4"], "--ranks goes with a script"),
        ("llama-3-8b", ["--seq-len", "0"], "--seq-len is 0"),
        ("llama-3-8b", ["--micro-batch", "0"], "--micro-batch is 0"),
    ],
)
def test_bad_input_ends_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], target: str, more: list[str], words: str
) -> None:
    code = main(["capture", target.format(folder=folder), "--out", str(folder / "bad.json"), *more])
    complaint = capsys.readouterr().err
    assert code == 2
    assert words in complaint
    assert complaint.count("\n") == 1
    assert not (folder / "bad.json").exists()


@pytest.mark.parametrize("name", ["step.json.gz", "nowhere/step.json"])
def test_a_file_that_cannot_be_written_is_found_before_anything_is_captured(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["capture", "llama-3-8b", "--out", str(folder / name)]) == 2
    assert str(folder / name) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"model": {"capture": "a", "name": "phi-2"}}, "already says model.name"),
        ({"model": {"capture": "a"}, "parallel": {"fsdp": 2}}, "parallel already"),
        ({"model": {"capture": "a"}, "cluster": None}, r"needs \[cluster\]"),
        ({"model": {"seq_len": 4}, "parallel": {"fsdp": 2}}, "missing key 'model.name'"),
        ({"model": {"name": "phi-2"}, "parallel": {"fsdp": 2}}, "missing key 'model.seq_len'"),
    ],
)
def test_contradicting_job_files_are_refused(table: dict[str, object], words: str) -> None:
    raw = {"job": {"name": "x"}, "cluster": {"preset": "a100_dgx"}, **table}
    with pytest.raises(JobError, match=words):
        parse_job({key: value for key, value in raw.items() if value is not None}, "job.toml")


def test_degrees_are_read_by_name() -> None:
    assert parse_parallel("fsdp=8, tensor=2,schedule=1f1b") == {"fsdp": 8, "tensor": 2, "schedule": "1f1b"}


def test_peak_memory_is_what_lives_at_once() -> None:
    """Resident 10; a (5) from 0 to 2, b (7) from 1 to 2, c (1) for ever from 2: at 1.5 s 22 bytes."""
    names = ("one", "two", "three")
    ops = tuple(CompOp(name=name, work=Gemm(1, 1, 1)) for name in names)
    buffers = (
        Buffer(name="a", num_bytes=5, maker="one", users=("two",)),
        Buffer(name="b", num_bytes=7, maker="two", users=("two",)),
        Buffer(name="c", num_bytes=1, maker="three"),
    )
    spans = {name: (float(n), n + 1.0) for n, name in enumerate(names)}
    assert peak_of_spans(Iteration("x", ops, True, buffers, 10), spans) == 22


def test_a_capture_without_overlap_says_so(tmp_path: Path) -> None:
    comm = CommOp(name="c", collective=Collective(CollectiveKind.ALL_REDUCE, 8, 2), communicator="dp")
    capture = IssuedStep(iteration=Iteration("x", (comm,), True), num_ranks=2, groups={"dp": (0, 1)})
    write_capture(tmp_path / "step.json.gz", capture)
    (tmp_path / "job.toml").write_text(JOB)
    with pytest.raises(JobError, match="nothing to tune"):
        _ = Job(read_job(tmp_path / "job.toml")).groups


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "communicators"),
    [("fsdp", {"fsdp"}), pytest.param("hybrid", {"fsdp", "replicate"}, marks=pytest.mark.long)],
)
def test_the_example_is_captured(tmp_path: Path, function: str, communicators: set[str]) -> None:
    script = Path(__file__).parents[2] / "examples" / "capture_fsdp.py"
    out = tmp_path / "step.json.gz"
    assert main(["capture", f"{script}:{function}", "--ranks", "16", "--out", str(out)]) == 0
    assert set(read_capture(out).groups) == communicators
