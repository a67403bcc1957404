"""`lagom show`: what a run or a file holds, against who wrote it."""

import json
from pathlib import Path

import pytest

import lagom_overlap
from lagom_overlap.capturing.file import write_capture
from lagom_overlap.cli import main
from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.collective.sites import CallType, Site, SiteSetting
from lagom_overlap.errors import LagomError
from lagom_overlap.export.saved import SavedSettings, write_saved
from lagom_overlap.results.layouts import LayoutsResult
from lagom_overlap.units import format_seconds
from lagom_overlap.verbs.show import run_show
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration
from lagom_overlap.workload.issued import IssuedStep

TRACE = Path(__file__).parents[1] / "data" / "h100" / "all_reduce_8ch.json.gz"
CLUSTER = '[cluster]\npreset = "a40_nvlink"\nnodes = 1\n'
MODEL = f'[job]\nname = "small"\n[model]\nname = "phi-2"\nseq_len = 256\n{CLUSTER}[parallel]\nfsdp = 8\n'
SHAPES = (
    f'[job]\nname = "shapes"\n{CLUSTER}[[group]]\nname = "g"\nop = [{{ name = "a", memory = "64 KiB" }}]\n'
    'comm = [{ name = "c", kind = "all_reduce", bytes = "1 MiB" }]\n'
    "[tune]\npairs = 3\nbudget = { measurements = 4 }\n"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("model.toml").write_text(MODEL, encoding="utf-8")
    Path("shapes.toml").write_text(SHAPES, encoding="utf-8")
    return tmp_path


def test_a_run_shows_what_its_verb_said(here: Path) -> None:
    result = lagom_overlap.simulate("model.toml", out="run")
    shown = run_show(Path("run"))
    assert shown.what == "a run of lagom simulate of job 'small'"
    assert set(result.summary().splitlines()) - {f"Written: {path}" for path in result.files} <= set(shown.said)
    assert f"MFU {100 * result.mfu:.1f} %" in shown.said[0]
    assert shown.next == "Next: lagom open run"


def test_an_analysis_loaded_from_its_folder_says_what_it_said(here: Path) -> None:
    result = lagom_overlap.analyze(TRACE, out="found")
    assert format_seconds(result.ranks[0].span_s / result.ranks[0].steps) in result.summary()
    assert lagom_overlap.load("found").summary() == result.summary()
    assert set(result.summary().splitlines()) <= set(run_show(Path("found")).said)


def test_ranked_variants_show_the_fastest_and_lead_to_its_job_file(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "model.toml", "--set", "parallel.micro_batch=1,2", "--out", "ranked"]) == 0
    capsys.readouterr()
    result, shown = lagom_overlap.load("ranked"), run_show(Path("ranked"))
    assert isinstance(result, LayoutsResult)
    assert shown.what == "a run of lagom simulate (layouts) of job 'small'"
    assert format_seconds(result.rows[0].iteration_s) in shown.said[0]
    assert shown.next.startswith("Next: lagom simulate ranked/best.toml")
    assert main(["runs", "."]) == 0
    assert "simulate (layouts)" in capsys.readouterr().out


def test_a_tuned_run_and_its_settings_tell_whether_they_were_adopted(here: Path) -> None:
    result = lagom_overlap.tune("shapes.toml", out="run")
    assert result.verdict is not None
    said = run_show(Path("run")).said
    assert result.summary().splitlines()[0] in said
    found = [line for line in said if line.startswith("found for g, c: ")]
    assert len(found) == (not result.changes_nothing)
    settings = run_show(Path("run/configs.toml"))
    assert ("not adopted" in settings.what) is not result.verdict.adopted
    assert [line.partition(": ")[0] for line in settings.said] == ["g c"]
    assert settings.next == "Next: lagom export run --format plugin"
    text = Path("run/configs.toml").read_text()
    Path("configs.toml").write_text(text)
    assert run_show(Path("configs.toml")).next == "", "there is no run beside it to export"
    Path("configs.toml").write_text(text.replace("adopted = true", 'adopted = "maybe"').replace("= false", '= "maybe"'))
    with pytest.raises(LagomError, match="adopted is 'maybe', must be true or false"):
        run_show(Path("configs.toml"))


def test_an_interrupted_search_says_so_and_how_to_go_on(here: Path) -> None:
    lagom_overlap.tune("shapes.toml", out="run")
    record = json.loads(Path("run/run.json").read_text())
    record["result"] |= {"interrupted": True, "verdict": None}
    Path("run/run.json").write_text(json.dumps(record))
    shown = run_show(Path("run"))
    assert "No verdict: interrupted after" in shown.said[0]
    assert shown.next == "Next: lagom resume run"


def test_a_model_file_is_shown_and_a_config_json_leads_to_init(here: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    }  # fmt: skip
    Path("config.json").write_text(json.dumps(config))
    assert main(["init", "config.json", "--cluster", "h100_dgx", "--gpus", "8"]) == 0
    shown = run_show(next(here.glob("*.model.toml")))
    assert shown.what.startswith("a model file, ")
    assert "1,235,814,400 parameters" in shown.said  # meta-llama/Llama-3.2-1B
    with pytest.raises(LagomError, match=r"is a model's config.json: lagom init config.json --cluster NAME --gpus N"):
        run_show(Path("config.json"))


def test_a_plan_tells_who_takes_it_and_what_it_sets(here: Path) -> None:
    lagom_overlap.plan("model.toml", out="run", work=0.1)
    shown = run_show(Path("run/plan.toml"))
    assert shown.what == "a plan for fsdp2"
    assert "fsdp2: units = embed, layers.0, layers.1, layers.2, layers.3, layers.4, ... (34 in all)" in shown.said
    text = Path("run/plan.toml").read_text(encoding="utf-8")
    Path("damaged.toml").write_text(text.replace("version = 2", "version = 99"), encoding="utf-8")
    with pytest.raises(LagomError, match="version 99"):
        run_show(Path("damaged.toml"))


def test_saved_settings_a_capture_and_a_job_file_are_told_apart(here: Path) -> None:
    call = CallType(
        description="fsdp", num_ranks=8, creation_order=0, kind=CollectiveKind.ALL_GATHER, num_bytes=1 << 20
    )
    saved = SavedSettings(
        world_size=8, route="plugin", is_adopted=True, verdict="1.1 times as fast", date="2026-01-01",
        settings=(SiteSetting(Site(call, 0), CommConfig(num_channels=4)),),
    )  # fmt: skip
    write_saved(Path("settings.json"), saved)
    shown = run_show(Path("settings.json"))
    assert shown.what == "settings of a tuned job, adopted"
    assert "all_gather of 1 MiB on 'fsdp': 4 channels" in shown.said

    gather = CommOp(
        name="ag", collective=Collective(CollectiveKind.ALL_GATHER, 1 << 20, 8), communicator="fsdp", deps=("mm",)
    )
    iteration = Iteration("tiny", (CompOp(name="mm", work=Gemm(64, 64, 64)), gather), is_dataflow=True)
    write_capture(Path("step.json"), IssuedStep(iteration=iteration, num_ranks=8, groups={"fsdp": tuple(range(8))}))
    shown = run_show(Path("step.json"))
    assert shown.what == "a captured step, 'tiny'"
    assert "1 x all_gather, 1 MiB in all" in shown.said

    assert run_show(Path("model.toml")).next == "Next: lagom simulate model.toml"
    assert run_show(Path("shapes.toml")).next == "Next: lagom tune shapes.toml"
    spaced = Path("a model's.toml")
    spaced.write_text(Path("model.toml").read_text().replace("fsdp = 8", "fsdp = { auto = [4, 8] }"))
    shown = run_show(spaced)
    assert shown.next == """Next: lagom simulate 'a model'"'"'s.toml'"""
    assert "[parallel] fsdp = {'auto': [4, 8]}" in shown.said


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "'nothing' does not exist; give a run folder"),
        ("text.txt", "'text.txt' is no file that lagom writes"),
        ("other.toml", "'other.toml' is no file of ours"),
        ("other.json", "'other.json'"),
        (str(TRACE), f"is a profiler's trace: lagom analyze {TRACE}"),
        (".", "'.' is no run folder"),
    ],
)
def test_what_is_not_ours_is_one_line(name: str, words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("hello", encoding="utf-8")
    Path("other.toml").write_text("[tool]\n", encoding="utf-8")
    Path("steers.toml").write_text('[job]\nname = "a\\u001b[2Jb"\n', encoding="utf-8")
    assert main(["show", "steers.toml"]) in (0, 2)
    assert "\x1b" not in "".join(capsys.readouterr())
    Path("other.json").write_text('{"a": 1}', encoding="utf-8")
    assert main(["show", name]) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert words in told.err


@pytest.mark.parametrize("width", [60, 80, 120])
def test_what_is_shown_fits_the_terminal(width: int, here: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["show", "model.toml"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= width
    assert "[parallel] fsdp = 8" in shown


def test_trials_of_several_groups_say_which_and_those_of_one_do_not(here: Path) -> None:
    result = lagom_overlap.simulate("model.toml", out="run")
    assert result.files
    row = {"configs": {}, "reason": "so", "priorities": {}, "measured": None, "failure": "it failed"}
    step = {"number": 0, "kind": "search"}
    journal = Path("run", "journal.0.jsonl")
    journal.write_text("{}\n" + json.dumps({**step, "groups": {"gather": row, "scatter": row}}) + "\n")
    said = run_show(Path("run")).said
    for line in ("group 2: scatter", "trial 0, group 1: so: it failed", "trial 0, group 2: so: it failed"):
        assert line in said
    journal.write_text("{}\n" + json.dumps({**step, "groups": {"gather": row}}) + "\n")
    said = run_show(Path("run")).said
    assert "trial 0: so: it failed" in said
    assert not [line for line in said if line.startswith("group ")]
