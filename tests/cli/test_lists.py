"""`lagom list`, `runs`, `open`, `completion`: what there is, against the files and parsers that it comes from."""

import json
import os
import shutil
import subprocess
import webbrowser
from pathlib import Path

import pytest

import lagom_overlap
from lagom_overlap.cli import main
from lagom_overlap.cli.flags import LISTED, SHELLS, VERBS
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.jobfile.spec import JobSpec, JobTable
from lagom_overlap.registry import PLANNERS, TUNERS, entry_point_names
from lagom_overlap.verbs.listing import Listed

PACKAGE = Path(lagom_overlap.__file__).parent
FILES = {
    "models": "workload/data", "clusters": "clusters", "gpus": "gpus", "frameworks": "frameworks"
}  # fmt: skip


def listed(kind: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert main(["list", kind, "--json"]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


def test_the_flags_offer_what_can_be_listed() -> None:
    assert tuple(Listed) == LISTED


@pytest.mark.parametrize("kind", FILES)
def test_every_file_of_the_package_is_listed(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = {path.stem for path in (PACKAGE / FILES[kind]).glob("*.toml")} - {"any"}
    assert {row["name"] for row in listed(kind, capsys)} == names


def test_a_listed_model_has_its_published_size(capsys: pytest.CaptureFixture[str]) -> None:
    row = next(row for row in listed("models", capsys) if row["name"] == "llama-3-70b")
    assert row["num_layers"] == 80
    assert row["num_params"] == pytest.approx(70.6e9, rel=0.002), "70.6 B: Meta's model card"


@pytest.mark.parametrize(("kind", "group"), [("tuners", TUNERS), ("planners", PLANNERS)])
def test_everybody_registered_is_listed_with_a_sentence(kind: str, group: str, capsys) -> None:
    rows = listed(kind, capsys)
    assert [row["name"] for row in rows] == entry_point_names(group)
    assert all(row["what"] for row in rows)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("kind", LISTED)
def test_a_list_fits_the_terminal(kind: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["list", kind]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= width


def save(folder: Path, name: str, date: str, *, has_report: bool) -> None:
    record = RunRecord.now(RunKind.TUNE, seed=None, job=JobSpec(job=JobTable(name=name)), date=date)
    contents = {"report.html": b"<p>"} if has_report else {}
    RunFolder.create(folder, name).write(record, None, contents)


def test_runs_are_listed_latest_first_and_the_latest_report_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert "No run in this folder or in its lagom-runs" in capsys.readouterr().out
    runs = Path("lagom-runs")
    runs.mkdir(mode=0o700)
    save(runs / "a", "first", "2026-01-01T00:00:00Z", has_report=True)
    save(runs / "b", "second", "2026-01-02T00:00:00Z", has_report=True)
    save(runs / "c", "third", "2026-01-03T00:00:00Z", has_report=False)
    assert main(["runs", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["runs"]
    assert [run["job"] for run in told] == ["third", "second", "first"]
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert main(["open"]) == 0
    assert opened == [(tmp_path / "lagom-runs" / "b" / "report.html").as_uri()]
    long = f"a-name-of-{'x' * 80}"
    save(Path(long), "fourth", "2026-01-04T00:00:00Z", has_report=True)  # as --out writes it
    capsys.readouterr()
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith(f" {long}"), "a name that is broken cannot be copied"
    assert lines[-1] == f"Next: lagom open {long}"
    assert main(["open", "lagom-runs/c"]) == 2
    assert "is a run of lagom tune without a report; it has run.json" in capsys.readouterr().err
    assert main(["runs", "nowhere"]) == 2


def completed(script: str, words: list[str]) -> list[str]:
    """What bash would offer for the last word."""
    typed = " ".join(f"'{word}'" for word in words)
    code = f"{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _lagom; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    ran = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    return ran.stdout.split()


def test_bash_completes_verbs_flags_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert set(VERBS) <= set(completed(script, ["lagom", ""]))
    assert completed(script, ["lagom", "pl"]) == ["plan"]
    assert completed(script, ["lagom", "tune", "--from"]) == ["--from-trace"]
    assert completed(script, ["lagom", "analyze", "--compat", ""]) == ["hta"]
    assert completed(script, ["lagom", "list", "mo"]) == ["models"]
    assert completed(script, ["lagom", "tune", "job"]) == [], "the shell offers files then"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_that_is_here_takes_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    ran = subprocess.run([shell, "-n"], input=capsys.readouterr().out, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("shell", SHELLS)
def test_no_help_is_cut_within_brackets(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert "sequences per iteration (with --model; default 2 per GPU)" in printed or shell == "bash"
    assert "(with --model'" not in printed


def test_fish_completes_verbs_flags_and_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    assert main(["completion", "fish"]) == 0
    (tmp_path / "lagom.fish").write_text(capsys.readouterr().out)

    def offered(line: str) -> list[str]:
        code = f"source {tmp_path}/lagom.fish; complete -C '{line}'"
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        ran = subprocess.run(["fish", "-c", code], capture_output=True, text=True, check=True, env=environment)
        return [each.partition("\t")[0] for each in ran.stdout.splitlines()]

    assert set(VERBS) <= set(offered("lagom "))
    assert offered("lagom pl") == ["plan"]
    assert offered("lagom tune --from") == ["--from-trace"]
    assert "models" in offered("lagom list ")


def test_zsh_completes_verbs_and_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In place of zsh's line editor, what it would be told: `_describe` and `compadd` say what they were given."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    assert main(["completion", "zsh"]) == 0
    (tmp_path / "_lagom").write_text(capsys.readouterr().out)

    def offered(words: str, prefix: str = "") -> str:
        num = len(words.split()) + (not prefix)
        code = (
            "compdef() { }; _files() { print files; }; compadd() { print -l -- ${@[2,-1]}; }\n"
            "_describe() { print -l -- ${(P)2}; }\n"
            f"source {tmp_path}/_lagom; words=({words} ''); CURRENT={num}; PREFIX='{prefix}'; _lagom"
        )
        ran = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, check=False)
        assert ran.stderr == ""
        return ran.stdout

    assert {line.partition(":")[0] for line in offered("lagom").splitlines()} >= set(VERBS)
    assert "--from-trace:" in offered("lagom tune --from", "--from")
    assert "models" in offered("lagom list")
    assert offered("lagom analyze --compat").split() == ["hta"]
