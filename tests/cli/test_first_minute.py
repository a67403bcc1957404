"""What a new user meets: lagom alone, the wrong verb for a file, a file named twice, relative paths, wide terminals."""

from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

import lagom_overlap
from lagom_overlap.cli import main
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.report.fitted_table import MOST_WIDTH, WIDTH, Fitted

TRACE = Path(__file__).parents[1] / "data" / "h100" / "all_reduce_8ch.json.gz"
JOB = """
[job]
name = "small"
[model]
name = "phi-2"
seq_len = 256
[cluster]
preset = "mine.toml"
[parallel]
fsdp = 8
"""
PRESETS = Path(lagom_overlap.__file__).parent / "clusters"


def test_lagom_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr()
    assert "simulate" in told.out
    assert told.err == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("analyze", "job.toml"),
            "lagom analyze: 'job.toml' is no trace; if it is a job file: lagom simulate job.toml",
        ),
        (("simulate", str(TRACE)), f"is a profiler's trace, no job file: lagom analyze {TRACE}"),
        (("tune", "."), "'.' is a folder, no job file; if it holds traces: lagom analyze ."),
    ],
)
def test_a_file_for_another_verb_is_told_which(
    words: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB, encoding="utf-8")
    assert main(list(words)) == 2
    told = capsys.readouterr()
    assert told.err.count("\n") == 1
    assert expected in told.err


def test_a_trace_that_is_named_twice_counts_once_and_the_result_says_so(tmp_path: Path) -> None:
    once = lagom_overlap.analyze([TRACE])
    (tmp_path / "same.json.gz").symlink_to(TRACE)
    twice = lagom_overlap.analyze([TRACE, tmp_path / "same.json.gz"])
    assert twice.ranks == once.ranks
    assert twice.warnings == (*once.warnings, "same.json.gz was named twice and counts once.")


def test_a_cluster_file_is_seen_from_the_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    text = (PRESETS / "a40_nvlink.toml").read_text(encoding="utf-8")
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    (folder / "job.toml").write_text(JOB, encoding="utf-8")
    (tmp_path / "preset.toml").write_text(JOB.replace("mine.toml", "a40_nvlink"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert lagom_overlap.simulate("jobs/job.toml").iteration_s == lagom_overlap.simulate("preset.toml").iteration_s


def test_a_budget_that_holds_no_verdict_is_told_before_the_job_runs() -> None:
    # By hand: 3 pairs of the default and 25 rounds of two are 56 windows of 5 steps.
    assert "280 steps" in OnlineOptions(max_steps=120).budget_warning
    assert OnlineOptions(max_steps=280).budget_warning == ""
    assert OnlineOptions(max_steps=0).budget_warning == "", "no search was asked for"


@pytest.mark.parametrize(("terminal", "expected"), [(80, 80), (100, 100), (200, MOST_WIDTH)])
def test_a_table_takes_a_wide_terminal_where_its_texts_would_wrap(terminal: int, expected: int) -> None:
    def shown(words: str) -> list[str]:
        table = Table(box=None, width=WIDTH, pad_edge=False)
        table.add_column("what", ratio=1)
        table.add_column("gain", justify="right", no_wrap=True)
        table.add_row(Text(words), Text("1.0 %"))
        console = Console(width=terminal, no_color=True)
        with console.capture() as captured:
            console.print(Fitted(table))
        return captured.get().splitlines()

    assert max(map(len, shown("word " * 40))) == expected
    assert max(map(len, shown("short"))) == WIDTH, "figures stay near their names"
