"""`lagom init` of a training script, a trace, and answers: what each says, and nothing that it does not."""

import tomllib
from pathlib import Path

import pytest

from lagom_overlap.cli import main
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.spec import read_job
from lagom_overlap.trace import reader
from lagom_overlap.verbs.init import InitRequest, asked_for, run_init
from lagom_overlap.verbs.init_script import read_script

EXAMPLE = Path(reader.__file__).with_name("example_trace.json.gz")
SCRIPT = """
import argparse, pathlib
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
pathlib.Path("ran").touch()
SEQ_LEN = 2 * 1024
parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch-size", type=int, default=4)
torch.distributed.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp_replicate", "dp_shard"))
model = AutoModelForCausalLM.from_pretrained("meta-llama/Meta-Llama-3-8B-Instruct")
fully_shard(model, mesh=mesh)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(text: str) -> Path:
    Path("train.py").write_text(text)
    return Path("train.py")


def test_a_script_that_says_all_gives_a_job_that_simulates_and_was_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    written(SCRIPT)
    assert main(["init", "train.py", "--cluster", "h100_dgx", "--gpus", "16"]) == 0
    told = capsys.readouterr().out
    assert not Path("ran").exists()
    assert "The script says: fsdp2 (line 13: fully_shard(...))" in told
    assert "backend nccl (line 10: init_process_group(...))" in told
    step = Job.read(Path("job.toml")).step
    assert step is not None
    # A mesh of 2 groups of 8, 2 * 1024 tokens, --micro-batch-size's default.
    layout = step.layout
    assert (step.model.name, step.seq_len, layout.micro_batch) == ("llama-3-8b", 2048, 4)
    assert (layout.data, layout.replicate, step.cluster.num_nodes) == (16, 2, 2)


def test_what_a_script_does_not_say_is_left_to_fill_in(capsys: pytest.CaptureFixture[str]) -> None:
    written("import torch\nseq_len = load_config().seq_len\nbatch_size = 4\nbatch_size = 8\n")
    assert main(["init", "train.py"]) == 0
    text = Path("job.toml").read_text()
    assert tomllib.loads(text) == {"job": {"name": "train"}, "model": {}, "cluster": {}, "parallel": {}}
    assert text.count("fill in") == 7  # six keys, and the line that explains
    assert "To fill in: name, seq_len, preset, nodes, framework, micro_batch." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("model = DDP(model)", "ddp"),
        ("model = torch.nn.parallel.DistributedDataParallel(model)", "ddp"),
        ("model = FullyShardedDataParallel(model)", "fsdp1"),
        ("import deepspeed\nmodel = DDP(model)", "deepspeed"),
        ("from megatron.core import parallel_state", "megatron"),
        ("fully_shard", None),
    ],
)
def test_the_wrapper_is_the_framework(text: str, framework: str | None) -> None:
    told = read_script(written(text)).framework
    assert (None if told is None else told.value) == framework


def test_a_mesh_that_is_computed_is_said_to_be_unread() -> None:
    facts = read_script(written("a = init_device_mesh('cuda', (world // 8, 8), mesh_dim_names=('dp', 'tp'))\n"))
    assert {key: told.value for key, told in facts.degrees.items()} == {"tensor": 8}
    assert facts.unread == ["line 1: mesh dimension 'dp', whose size or meaning is not told"]


def test_a_name_in_a_script_ends_no_line_of_the_job_file() -> None:
    written('AutoModel.from_pretrained("x\\n[tune]\\nseed = 7")\nadd_argument("--seq-len\\n[a]", default=3)\n')
    assert main(["init", "train.py"]) == 0
    assert "tune" not in tomllib.loads(Path("job.toml").read_text())


@pytest.mark.parametrize("text", ["x = ", "\x00", "(" * 3000])
def test_what_is_no_python_is_one_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    written(text)
    assert main(["init", "train.py"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lagom init: 'train.py' is no Python script")
    assert err.count("\n") == 1
    assert not Path("job.toml").exists()


def test_a_trace_gives_a_job_that_from_trace_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["init", str(EXAMPLE)]) == 0
    told = capsys.readouterr().out
    assert "group fsdp: 8 ranks" in told
    assert "60 x all_gather of 192 MiB on fsdp" in told
    assert f"Next: lagom tune job.toml --from-trace {EXAMPLE}" in told
    spec = read_job(Path("job.toml"), may_lack_work=True)
    assert spec.cluster is not None
    assert (spec.cluster.preset, spec.cluster.nodes) == ("h100_dgx", 1)
    assert main(["tune", "job.toml"]) == 2  # without the trace nothing says what is trained
    assert "give either [model]" in capsys.readouterr().err
    seen = []
    monkeypatch.setattr("lagom_overlap.cli.tune.job_for", lambda spec, *_, **__: seen.append(spec) or tuned())
    assert main(["tune", "job.toml", "--from-trace", str(EXAMPLE)]) == 2  # past the job file
    assert seen == [spec]


def tuned() -> Job:
    raise JobError("far enough: fitting a model to the trace takes longer")


def test_questions_are_put_until_each_is_answered() -> None:
    answers = iter(["llama-3-9b", "llama-3-8b", "h100", "h100_dgx", "12", "none", "16", "x", ""])
    asked: list[str] = []
    told: list[str] = []

    def ask(question: str) -> str:
        asked.append(question.partition(" (")[0])
        return next(answers)

    request = asked_for(ask, told.append)
    assert asked == ["Model"] * 2 + ["Cluster"] * 2 + ["GPUs"] * 3 + ["Tokens per sequence"] * 2
    assert len(told) == 5
    assert "did you mean 'llama-3-8b'" in told[0]
    assert "a multiple" in told[2]
    assert (request.source, request.cluster, request.num_gpus, request.seq_len) == ("llama-3-8b", "h100_dgx", 16, 4096)
    assert run_init(request).files == (Path("job.toml"),)


def test_without_a_terminal_a_missing_source_or_cluster_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 2
    assert "on a terminal, questions" in capsys.readouterr().err
    with pytest.raises(JobError, match="needs --cluster NAME and --gpus N"):
        run_init(InitRequest(source="phi-2"))
