"""Ranked layouts against `lagom simulate` of each, against all of them, and against a published recipe."""

import json
import os
import signal
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lagom_overlap.cli import main
from lagom_overlap.interrupts import as_interrupts
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind
from lagom_overlap.jobfile.step import job_step
from lagom_overlap.planners.layout_search import SearchProgress
from lagom_overlap.results.layouts import LayoutRow, LayoutsResult
from lagom_overlap.verbs import simulate_layouts
from lagom_overlap.verbs.load import load_run
from lagom_overlap.verbs.simulate_layouts import LayoutsRequest, run_layouts

MODEL = '[job]\nname = "m"\n[model]\nname = "llama-3.2-1b"\nseq_len = 2048\n[cluster]\npreset = "h100_dgx"\n'
OWN_MODEL = (
    'name = "own"\nnum_layers = 2\nhidden = 512\nffn = 2048\nnum_heads = 8\nnum_kv_heads = 8\nhead_dim = 64\n'
    "vocab = 32000\ngated = true\ntied_embeddings = false\n"
)
SMALL = LayoutsRequest(model="llama-3.2-1b", cluster="h100_dgx", num_gpus=2, frameworks=("megatron",))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_fastest_layout_is_a_job_file_that_simulate_reads_back_to_the_digit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ranked = told(capsys, "simulate", "--model", "llama-3.2-1b", "--cluster", "h100_dgx", "--gpus", "2", "--out", "run")
    alone = told(capsys, "simulate", "run/best.toml")
    best = ranked["rows"][0]
    assert [best[key] for key in ("iteration_s", "mfu", "memory_bytes")] == [
        alone[key] for key in ("iteration_s", "mfu", "memory_bytes")
    ]
    assert best["iteration_s"] == min(row["iteration_s"] for row in ranked["rows"])
    run = RunFolder.read(Path("run"))
    assert run.kind is RunKind.LAYOUTS
    assert run.files == ("best.toml", "report.html", "run.json")
    page = Path("run/report.html").read_text()
    assert "lagom simulate run/best.toml" in page
    others, frontier = json.loads(page.split('id="figure-layouts">')[1].split("</script>")[0])["data"]
    assert len(others["x"]) + len(frontier["x"]) == len(ranked["rows"])
    assert frontier["x"] == sorted(frontier["x"])
    assert frontier["y"] == sorted(frontier["y"], reverse=True)


def test_the_ranking_agrees_with_simulating_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[tuple[LayoutRow, float]]()
    real = simulate_layouts._Simulated.__call__

    def remembered(self: Any, one: Any) -> Any:
        outcome = real(self, one)
        if isinstance(outcome, float):
            seen.append((self.rows[-1], one.bound_s))
        return outcome

    monkeypatch.setattr(simulate_layouts._Simulated, "__call__", remembered)
    found = run_layouts(replace_out(SMALL, tmp_path / "found"))
    num_found = len(seen)
    monkeypatch.setattr(simulate_layouts, "KEPT", 10_000)
    monkeypatch.setattr(simulate_layouts, "MOST_SIMULATED", 10_000)
    every = run_layouts(replace_out(SMALL, tmp_path / "every"))
    assert found.rows[:3] == every.rows[:3]
    assert num_found == len(found.rows) < len(every.rows) / 2
    assert all(bound_s <= row.iteration_s for row, bound_s in seen)
    assert every.num_certain == len(every.rows)
    frontier = [row for row in every.rows if row.is_on_frontier]
    assert frontier == [
        row
        for row in every.rows
        if not any(
            other.iteration_s <= row.iteration_s and other.memory_bytes < row.memory_bytes for other in every.rows
        )
        and not any(
            other.iteration_s < row.iteration_s and other.memory_bytes == row.memory_bytes for other in every.rows
        )
    ]


def replace_out(request: LayoutsRequest, out: Path) -> LayoutsRequest:
    return replace(request, out=out)


@pytest.mark.long
def test_the_layout_of_llama_3_70b_on_64_h100s_is_that_of_nvidias_recipe(tmp_path: Path) -> None:
    """Megatron-Bridge's performance recipe, BF16: TP 4, PP 4, CP 2, VP 5, micro-batch 1, 128 sequences of 8192."""
    request = LayoutsRequest(
        model="llama-3-70b", cluster="h100_dgx", num_gpus=64, seq_len=8192, frameworks=("megatron",), out=tmp_path / "r"
    )
    result = run_layouts(request)
    keys = ("tensor", "pipeline", "context", "chunks", "micro_batch", "data", "global_batch")
    assert [result.rows[0].keys[key] for key in keys] == [4, 4, 2, 5, 1, 2, 128]
    assert "recompute" not in result.rows[0].keys


def test_a_layout_whose_stages_are_written_out_has_a_bound_like_any_other() -> None:
    """DeepSeek-V3's 61 layers are cut by name; its ranking was empty because the bound could not be counted."""
    request = LayoutsRequest(model="deepseek-v3", cluster="h100_dgx", num_gpus=256)
    keys = {
        "pipeline": 4,
        "data": 64,
        "expert": 64,
        "pipeline_layout": f"E{'t' * 15}|{'t' * 16}|{'t' * 16}|{'t' * 14}mL",
    }
    step = job_step(request.spec(keys))
    assert step is not None
    assert 0 < simulate_layouts._bound_s(step, {}) <= step.times.iteration_s


def test_an_interrupted_ranking_keeps_what_was_simulated(tmp_path: Path) -> None:
    def interrupt(progress: SearchProgress) -> None:
        if progress.num_simulated == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with as_interrupts():
        result = run_layouts(replace_out(SMALL, tmp_path / "run"), interrupt)
    assert result.interrupted
    assert 2 <= len(result.rows) <= 3
    assert "Interrupted" in result.summary()
    assert (tmp_path / "run" / "best.toml").is_file()


def variants(capsys: pytest.CaptureFixture[str], folder: Path, text: str, *words: str) -> Any:
    job = folder / "job.toml"
    job.write_text(text)
    return told(capsys, "simulate", str(job), "--out", str(folder / "run"), *words)


def test_several_values_of_a_key_are_ranked_each_as_a_job_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel = "[parallel]\nfsdp = 4\nglobal_batch = 16\n"
    found = variants(capsys, tmp_path, MODEL + parallel, "--set", "parallel.fsdp=2,4,8")
    alone = {}
    for fsdp in (2, 4, 8):
        job = tmp_path / f"{fsdp}.toml"
        job.write_text(MODEL + parallel.replace("fsdp = 4", f"fsdp = {fsdp}"))
        alone[fsdp] = told(capsys, "simulate", str(job))["iteration_s"]
        assert (
            told(capsys, "simulate", str(tmp_path / "job.toml"), "--set", f"parallel.fsdp={fsdp}")["iteration_s"]
            == alone[fsdp]
        )
    assert {row["keys"]["fsdp"]: row["iteration_s"] for row in found["rows"]} == alone
    assert found["rows"][0]["keys"] == {"fsdp": 8}
    assert tomllib.loads((tmp_path / "run" / "best.toml").read_text())["parallel"]["fsdp"] == 8


def test_variants_of_unequal_work_are_ranked_by_tokens_per_second_and_none_lends_its_batch_to_the_headline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sequences a GPU take longer than one, and train more in a second."""
    job = tmp_path / "job.toml"
    job.write_text(MODEL + "[parallel]\nfsdp = 8\n")
    words = ("simulate", str(job), "--set", "parallel.micro_batch=1,2", "--out", str(tmp_path / "run"))
    assert main([*words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "sequences" not in printed.split(":")[0]
    assert "by tokens per second" in printed
    assert "tokens/s/GPU" in printed
    result = load_run(tmp_path / "run")
    assert isinstance(result, LayoutsResult)
    first, second = result.rows
    assert (first.keys, second.keys) == ({"micro_batch": 2}, {"micro_batch": 1})
    assert first.num_tokens == 2 * second.num_tokens
    assert first.iteration_s > second.iteration_s
    for row, told in zip(result.rows, result.table(), strict=True):
        assert row.tokens_per_s == pytest.approx(row.num_tokens / row.iteration_s)
        assert told["tokens_per_s_per_gpu"] == pytest.approx(row.num_tokens / row.iteration_s / 8)
    assert result.figure().layout.yaxis.title.text == "tokens/s per GPU"


def test_best_toml_names_files_of_ones_own_as_seen_from_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model as of a job file's variants, and the row that simulate gives from there is the ranked one."""
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    Path("own.model.toml").write_text(OWN_MODEL)
    ranked = told(capsys, "simulate", "--model", "own.model.toml", "--cluster", "h100_dgx", "--gpus", "1")
    folder = Path(ranked["files"][0]).parent
    assert told(capsys, "simulate", str(folder / "best.toml"))["iteration_s"] == ranked["rows"][0]["iteration_s"]
    text = MODEL.replace('"llama-3.2-1b"', '"../own.model.toml"') + "[parallel]\nfsdp = 2\n"
    found = variants(capsys, Path("jobs"), text, "--set", "parallel.micro_batch=1,2")
    assert told(capsys, "simulate", "jobs/run/best.toml")["iteration_s"] == found["rows"][0]["iteration_s"]


def test_variants_that_have_the_keys_of_a_ranking_are_shown_as_variants(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(MODEL + "[parallel]\ndata = 2\n")
    words = ["parallel.framework=megatron,ddp", "parallel.micro_batch=1,2", "parallel.global_batch=8,16"]
    sets = [word for said in words for word in ("--set", said)]
    assert main(["simulate", str(job), "--out", str(tmp_path / "run"), *sets]) == 0
    shown = capsys.readouterr().out
    assert ", global_batch = 16: " in " ".join(shown.split())
    assert shown.count("framework = ") == 9, "eight variants and the headline"


def test_auto_in_the_file_says_the_same_and_what_cannot_be_built_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel = "nodes = 1\n[parallel]\ntensor = { auto = [1, 2, 3] }\nzero_stage = 1\nglobal_batch = 16\n"
    found = variants(capsys, tmp_path, MODEL + parallel, "--set", 'parallel.recompute=none,"full"')
    assert found["num_layouts"] == 6
    assert {(row["keys"]["tensor"], row["keys"]["recompute"]) for row in found["rows"]} == {
        (tensor, recompute) for tensor in (1, 2) for recompute in ("none", "full")
    }
    assert {row["num_gpus"] for row in found["rows"]} == {8}
    assert {one["keys"]["tensor"] for one in found["refused"]} == {3}
    assert "data fills the cluster's GPUs" in found["notes"][0]


def test_groups_of_fsdp_that_leave_gpus_are_repeated_and_the_fastest_is_such_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parallel = "nodes = 2\n[parallel]\nfsdp = 16\nglobal_batch = 32\n"
    found = variants(capsys, tmp_path, MODEL + parallel, "--set", "parallel.fsdp=4,5,8,16")
    shown = {row["keys"]["fsdp"]: row for row in found["rows"]}
    assert {fsdp: row["keys"].get("replicate") for fsdp, row in shown.items()} == {4: 4, 8: 2, 16: None}
    assert {row["num_gpus"] for row in found["rows"]} == {16}
    assert [one["keys"] for one in found["refused"]] == [{"fsdp": 5}]
    alone = told(capsys, "simulate", str(tmp_path / "job.toml"), *sets("fsdp=8", "replicate=2"))
    assert shown[8]["iteration_s"] == alone["iteration_s"]
    best = told(capsys, "simulate", str(tmp_path / "run" / "best.toml"))
    assert best["iteration_s"] == found["rows"][0]["iteration_s"]
    given = variants_again(capsys, tmp_path, *sets("fsdp=4,8", "replicate=2"))
    assert [one["keys"] for one in given["refused"]] == [{"fsdp": 4}], "what is given is not filled up"


def sets(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--set", f"parallel.{key}")]


def variants_again(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> Any:
    return told(capsys, "simulate", str(folder / "job.toml"), "--out", str(folder / "again"), *words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give a job file, or --model, --cluster and --gpus"),
        (("--model", "llama-3-8b"), "--model needs --cluster too"),
        (("--model", "llama-3-8b", "--cluster", "h100_dgx"), "--model needs --gpus too"),
        (("--model", "llama-3-8b", "--cluster", "h100_dgx", "--gpus", "12"), "--gpus 12: must be at most a node's 8"),
        (("--model", "llama-3-9b", "--cluster", "h100_dgx", "--gpus", "8"), "did you mean 'llama-3-8b'"),
        (("--model", "llama-3-405b", "--cluster", "a40_pcie", "--gpus", "1"), "no layout of llama-3-405b fits 1 GPU"),
        (("--model", "phi-2", "--cluster", "h100_dgx", "--gpus", "8", "--framework", "megatorn"), "megatron"),
        (("job.toml", "--gpus", "8"), "--gpus goes with --model"),
        (("job.toml", "--set", "cluster.nodes=2"), "but cluster 'h100_dgx' has 16 (2 x 8): replicate = 4 fills it"),
        (("job.toml", "--set", "cluster.nodes=2", "--set", "parallel.fsdp=3"), ": fsdp = 16 fills it"),
        (("job.toml", "--set", "fsdp=8"), "must be TABLE.KEY=VALUE"),
        (("job.toml", "--set", "parallel.fdsp=8"), "unknown key 'parallel.fdsp' (did you mean 'fsdp'?)"),
        (("job.toml", "--set", "parallel.fsdp=4,x"), "x"),
        (("job.toml", "--set", "parallel.fsdp=,"), "must be TABLE.KEY=VALUE"),
        (("job.toml", "--set", "parallel.fsdp=8]"), "must be TABLE.KEY=VALUE"),
        (("job.toml", "--set", "parallel.fsdp={a=1}"), "must be a number, a word, or a list"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(MODEL + "[parallel]\nfsdp = 4\n")
    code = main(["simulate", *words])
    printed = capsys.readouterr()
    if message == "x":  # the value that can be simulated is, and the other is told
        assert code == 0
        assert "Not simulated: fsdp = x" in printed.out
        return
    assert code == 2
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not Path("lagom-runs").exists()


def test_the_frontier_goes_by_memory_as_a_number(tmp_path: Path) -> None:
    result = run_layouts(replace_out(SMALL, tmp_path / "run"))
    sizes = (9_900_000_000, 10_100_000_000, 99_000_000_000)
    rows = tuple(replace(result.rows[0], memory_bytes=size, is_on_frontier=True) for size in sizes)
    _, frontier = replace(result, rows=rows[::-1]).figure().data
    assert list(frontier.x) == [9.9, 10.1, 99.0]
