"""`lagom init`: the job file that it writes is one, and says what simulate says."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from lagom_overlap.cli import main
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.verbs.init_config import model_table
from lagom_overlap.verbs.simulate_layouts import LayoutsRequest, run_layouts
from lagom_overlap.workload.models import load_model

# meta-llama/Llama-3.2-1B, Qwen/Qwen3-30B-A3B, mistralai/Mixtral-8x7B-v0.1: config.json as published.
LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    "head_dim": 64,
}  # fmt: skip
QWEN = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768, "vocab_size": 151936,
    "tie_word_embeddings": False, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "tie_word_embeddings": False,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*words: str) -> int:
    return main(["init", *words, "--cluster", "h100_dgx", "--gpus", "8"])


@pytest.mark.parametrize(
    ("config", "name"), [(LLAMA, "llama-3.2-1b"), (QWEN, "qwen3-30b-a3b"), (MIXTRAL, "mixtral-8x7b")]
)
def test_a_published_config_gives_the_shapes_of_the_model_that_is_in_the_package(config: Any, name: str) -> None:
    table, ours = model_table(config, "config.json"), load_model(name)
    assert {key: getattr(ours, key) for key in table if key != "name"} == {
        key: value for key, value in table.items() if key != "name"
    }


def test_the_job_file_is_what_simulate_reads_and_memory_and_step_are_as_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert init("llama-3-8b") == 0
    told = capsys.readouterr().out
    assert main(["simulate", "job.toml", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert f"{simulated['memory_bytes'] / 1e9:.1f} GB of 85.0 GB per GPU" in told
    assert f"{simulated['tokens_per_s']:,.0f} tokens/s" in told
    assert "Next: lagom simulate job.toml" in told


def test_a_model_that_does_not_fit_is_recomputed_and_the_file_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert init("qwen3-32b", "--seq-len", "8192") == 0
    assert "It barely fits with every layer recomputed" in capsys.readouterr().out
    assert 'recompute = "full"    # ' in Path("job.toml").read_text()


def test_where_fsdp_does_not_fit_the_file_has_the_fastest_layout_of_the_ranking(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At 131,072 tokens the logits alone of one sequence are 67 GB in FP32."""
    size = ("--cluster", "h100_dgx", "--gpus", "2", "--seq-len", "131072")
    assert main(["init", "llama-3.2-1b", *size]) == 0
    told = capsys.readouterr().out
    assert "FSDP over all GPUs does not fit, so" in told
    assert "Which layout is the fastest" not in told
    assert main(["simulate", "job.toml", "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)
    assert main(["simulate", "--model", "llama-3.2-1b", *size, "--json"]) == 0
    assert ours["iteration_s"] == json.loads(capsys.readouterr().out)["rows"][0]["iteration_s"]


def test_where_nothing_fits_the_next_line_is_a_job_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights, gradients and Adam of 3.2 B parameters in FP32 are 51 GB: more than one or two A10G have."""
    words = ["init", "llama-3.2-3b", "--cluster", "a10g_g5", "--gpus", "1", "--seq-len", "2048", "--out", "one.toml"]
    assert main(words) == 0
    first = capsys.readouterr().out
    assert "As it stands, it does not fit" in first
    typed = first.partition("Next: lagom ")[2].partition("#")[0].split()
    assert typed[0] == "init"
    more = int(typed[typed.index("--gpus") + 1])
    assert main(typed) == 0
    assert "It fits" in capsys.readouterr().out
    with pytest.raises(JobError, match="no layout"):
        run_layouts(LayoutsRequest(model="llama-3.2-3b", cluster="a10g_g5", num_gpus=more // 2, seq_len=2048))


def test_a_file_that_is_there_ends_init_before_it_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("job.toml").touch()
    monkeypatch.setattr("lagom_overlap.verbs.init.fastest_layout", lambda _: pytest.fail("it searched"))
    assert main(["init", "llama-3.2-1b", "--cluster", "h100_dgx", "--gpus", "2", "--seq-len", "131072"]) == 2


def test_a_config_json_gives_a_model_file_next_to_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(json.dumps(LLAMA))
    assert init("config.json", "--check") == 0
    checked, _, following = capsys.readouterr().out.partition("Next: ")
    assert "tokens/s" in checked
    assert following.startswith("lagom init config.json --cluster h100_dgx --gpus 8 ")
    assert [path.name for path in Path().iterdir()] == ["config.json"]
    assert init("config.json", "--out", "new.toml") == 0
    assert checked in capsys.readouterr().out
    assert init("config.json", "--out", "again.toml") == 0, "of the same model"
    step, named = Job.read(Path("new.toml")).step, load_model("llama-3.2-1b")
    assert step is not None
    assert step.model.num_params == named.num_params


def test_files_of_ones_own_are_found_from_where_the_job_file_lies(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.json").write_text(json.dumps(LLAMA))
    Path("jobs").mkdir()
    Path("mine.toml").write_text(resources.files("lagom_overlap.clusters").joinpath("h100_dgx.toml").read_text())
    words = ["init", "config.json", "--cluster", "mine.toml", "--gpus", "8", "--out", "jobs/job.toml"]
    assert main(words) == 0
    assert "Next: lagom simulate jobs/job.toml" in capsys.readouterr().out
    assert main(["simulate", "jobs/job.toml"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("llama-3-9b",), "did you mean 'llama-3-8b'"),
        (("nonesuch.json",), "'nonesuch.json' does not exist"),
        (("noise.json",), "is no JSON"),
        (("list.json",), "is no config.json of a model"),
        (("deep.json",), "is no JSON"),
        (("kinds.json",), "model_type is \"['llama']\""),
        (("bert.json",), "model_type is 'bert', known here are llama, mistral, mixtral, qwen2, qwen3, qwen3_moe"),
        (("short.json",), "hidden_size is missing, must be a whole number"),
        (("text.json",), "hidden_size is '2048', must be a whole number"),
        (("",), "SOURCE is empty, must be a model's name"),
        (("phi-2", "--out", "link"), "'link' is there already"),
        (("dense.json",), "mlp_only_layers is [0]"),
        (("phi-2", "--out", "noise.json"), "'noise.json' is there already"),
        (("phi-2", "--out", "no/job.toml"), "does not exist"),
        (("phi-2", "--out", "/"), "--out '/': must be a file's name"),
        (("phi-2", "--seq-len", "0"), "'0' is no count"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "noise.json": b"\xff{", "list.json": b"[]", "bert.json": b'{"model_type": "bert"}',
        "deep.json": b'{"a":' + b"[" * 100_000, "kinds.json": b'{"model_type": ["llama"]}',
        "short.json": b'{"model_type": "llama", "num_attention_heads": 4}',
        "text.json": json.dumps(LLAMA | {"hidden_size": "2048"}).encode(),
        "dense.json": json.dumps(QWEN | {"mlp_only_layers": [0]}).encode(),
    }  # fmt: skip
    for name, content in files.items():
        Path(name).write_bytes(content)
    Path("link").symlink_to("nowhere")
    try:
        code = init(*words)
    except SystemExit as ended:
        code = int(str(ended.code))
    printed = capsys.readouterr()
    assert (code, printed.err.count("\n")) == (2, 1)
    assert message in printed.err
    assert {path.name for path in Path().iterdir()} == {*files, "link"}
