"""`lagom init` of a training script, a trace, and answers: what each says, and nothing that it does not."""

import tomllib
from pathlib import Path

import pytest

from lagom_overlap.cli import main
from lagom_overlap.cli.init import asked_for
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.trace import reader
from lagom_overlap.verbs.init import run_init
from lagom_overlap.verbs.init_file import InitRequest
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
    told = capsys.readouterr().out
    keys = "model.name, model.seq_len, cluster.preset, cluster.nodes, parallel.framework, parallel.micro_batch"
    assert f"To fill in: {keys}." in " ".join(told.split())
    assert "Not told: line 2: seq_len is no number that stands there" in told
    assert "Not told: line 3, 4: batch_size is no number" in told
    assert main(["init", "train.py", "--check"]) == 2
    printed = capsys.readouterr()
    assert f"cannot be checked, because {keys} are not told" in printed.err
    assert "Next: lagom init train.py" in printed.out


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


LITERALS = """
BATCH, WORLD = 2, 8
BATCH = 2
SEQ = 4096
init_process_group("nccl")
mesh = init_device_mesh("cuda", (8,))
config = LlamaConfig(hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True, head_dim=64)
fully_shard(LlamaForCausalLM(config), mesh=mesh)
loader = DataLoader(dataset, BATCH)
"""


def test_shapes_sizes_and_a_mesh_that_are_written_out_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    written(LITERALS)
    assert main(["init", "train.py", "--cluster", "h100_dgx"]) == 0
    told = capsys.readouterr().out
    step = Job.read(Path("job.toml")).step
    assert step is not None
    # The shapes of meta-llama/Llama-3.2-1B's config.json, and its parameters.
    assert (step.model.num_params, step.seq_len, step.layout.micro_batch) == (1_235_814_400, 4096, 2)
    assert (step.layout.data, step.layout.zero_stage, step.cluster.num_nodes) == (8, 3, 1)
    assert "It fits: " in told
    assert "lagom run --observe -- torchrun --nproc-per-node 8 train.py" in told


def test_a_check_that_is_not_passed_ends_nonzero_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    written(LITERALS.replace("BATCH = 2", "BATCH = 512"))
    assert main(["init", "train.py", "--cluster", "h100_dgx", "--check"]) == 2
    assert "lagom init: it does not fit: parallel: stage 0 needs" in capsys.readouterr().err
    assert main(["init", "llama-3-8b", "--cluster", "h100_dgx", "--gpus", "1", "--check"]) == 2
    assert "it does not fit" in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} == {"train.py"}


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("TrainingArguments(per_device_train_batch_size=2, gradient_accumulation_steps=4)", (None, 2, 4)),
        ("DataLoader(data, batch_size=3)", (None, 3, None)),
        ("parser.add_argument('--seq-length', type=int, default=8192)", (8192, None, None)),
        ("def train(seq_len=1024, *, batch_size: int = 6): pass", (1024, 6, None)),
        ("config = {'block_size': 256, 'batch_size': 5}", (256, 5, None)),
        ("class Arguments:\n    max_seq_len: int = 2048", (2048, None, None)),
        ("self.config.seq_len = 2048\nbatch = next(data)", (2048, None, None)),
    ],
)
def test_sizes_in_the_usual_idioms_are_read(text: str, sizes: tuple[int | None, ...]) -> None:
    facts = read_script(written(text))
    found = {key: told.value for key, told in facts.sizes.items()}
    assert tuple(map(found.get, ("seq_len", "micro_batch", "num_micro_batches"))) == sizes
    assert not facts.unread


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("parser.add_argument('--seq-len', type=int)", "line 1: --seq-len is no number that stands there"),
        ("DataLoader(data, batch_size=args.batch_size)", "line 1: DataLoader(batch_size=...) is no number"),
        ("DataLoader(a, 4)\nDataLoader(b, 8)", "DataLoader(batch_size=8) is 8; 4 is taken"),
        ("GPTConfig(n_layer=12, n_head=12)", "line 1: GPTConfig(...), a model that is not known here"),
        ("init_device_mesh('cuda', (2, 4))", "line 1: a device mesh whose dimensions have no names"),
        ("init_device_mesh('a', (2,))\ninit_device_mesh('b', (4,))", "line 2: another device mesh; that of line 1 is"),
        ("init_device_mesh('cuda', shape)", "line 1: a device mesh whose shape is not written out"),
        ("LlamaConfig(hidden_size=4096)", "which leaves num_hidden_layers, num_attention_heads, vocab_size, inter"),
        ("LlamaConfig(hidden_size=args.dim, intermediate_size=1, num_hidden_layers=1, num_attention_heads=1, "
         "vocab_size=1)", "hidden_size is 'args.dim', must be a whole number"),
    ],
)  # fmt: skip
def test_what_is_not_written_out_is_named(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    written(text)
    assert main(["init", "train.py"]) == 0
    assert said in " ".join(capsys.readouterr().out.split())


def test_gpus_that_the_mesh_contradicts_are_refused_and_so_is_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    written(SCRIPT)
    assert main(["init", "train.py", "--cluster", "h100_dgx", "--gpus", "8"]) == 2
    message = "--gpus 8: must be 16, the GPUs of the script's device mesh (line 11: fsdp 8 x replicate 2)"
    assert message in capsys.readouterr().err
    assert not Path("job.toml").exists()
    written(SCRIPT.replace("(2, 8)", "(world // 8, 8)"))
    assert main(["init", "train.py", "--cluster", "h100_dgx", "--gpus", "12"]) == 2
    assert "must be a multiple of 8" in capsys.readouterr().err
    assert main(["init", "train.py", "--cluster", "h100_dgx", "--gpus", "16"]) == 0


def test_the_global_batch_is_what_the_script_accumulates_on_all_gpus() -> None:
    written(SCRIPT + "TrainingArguments(per_device_train_batch_size=4, gradient_accumulation_steps=4)\n")
    assert main(["init", "train.py", "--cluster", "h100_dgx", "--gpus", "16"]) == 0
    step = Job.read(Path("job.toml")).step
    assert step is not None
    assert step.layout.global_batch == 4 * 4 * 16


def test_a_mesh_that_is_computed_is_said_to_be_unread() -> None:
    facts = read_script(written("a = init_device_mesh('cuda', (world // 8, 8), mesh_dim_names=('dp', 'tp'))\n"))
    assert {key: told.value for key, told in facts.degrees.items()} == {"tensor": 8}
    assert facts.unread == ["line 1: mesh dimension 'dp', whose size or meaning is not told"]


def test_a_name_in_a_script_ends_no_line_of_the_job_file() -> None:
    written('AutoModel.from_pretrained("x\\n[tune]\\nseed = 7")\nadd_argument("--seq-len\\n[a]", default=3)\n')
    assert main(["init", "train.py"]) == 0
    assert "tune" not in tomllib.loads(Path("job.toml").read_text())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = ", "is no Python script, line 1: invalid syntax"),
        ("\x00", "is no Python script: source code string cannot contain null bytes"),
        ("(" * 3000, "is no Python script, line 1: too many nested parentheses"),
        ("a" + "+a" * 100_000, "is nested too deeply to be read"),
        ("x = 2" + "*2" * 2000, "is nested too deeply to be read"),
        ("x = " + "-" * 100_000 + "1", "is nested too deeply to be read"),
        ("x = " + "9" * 5000, "is no Python script, line 1: Exceeds the limit (4300 digits)"),
    ],
)
def test_what_is_no_python_is_one_line(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    written(text)
    assert main(["init", "train.py"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"lagom init: 'train.py' {said}")
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
    assert "on a terminal it asks" in capsys.readouterr().err
    with pytest.raises(JobError, match="needs --cluster NAME and --gpus N"):
        run_init(InitRequest(source="phi-2"))


def test_ranks_of_several_nodes_are_told_where_they_meet(capsys: pytest.CaptureFixture[str]) -> None:
    written(LITERALS.replace("(8,)", "(16,)"))
    assert main(["init", "train.py", "--cluster", "h100_dgx"]) == 0
    line = capsys.readouterr().out.split("lagom run --observe -- ")[1].splitlines()[0]
    meets = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    assert line == f"torchrun --nnodes 2 {meets} --nproc-per-node 8 train.py"
