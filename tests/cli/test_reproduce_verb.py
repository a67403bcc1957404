"""`lagom reproduce` from the command line."""

import argparse
import json
import signal
from pathlib import Path

import pytest

from lagom_overlap.cli import main
from lagom_overlap.errors import JobError, OutputError, UnknownNameError
from lagom_overlap.papers import cli as reproduce
from lagom_overlap.papers.flags import add_parser
from lagom_overlap.papers.reproduce.result import ReproducedVerdict


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["reproduce", *flags])
    return reproduce.run(arguments)


def test_json_is_one_object_with_a_verdict_and_a_reason_per_line(capsys) -> None:
    assert run("fig5", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chapters"] == ["fig5"]
    assert {line["profile"] for line in found["lines"]} == {"plausible", "paper_scale"}
    assert all(line["verdict"] in {v.value for v in ReproducedVerdict} for line in found["lines"])
    assert all(line["why"] and line["taken"] and line["published"] and line["ours"] for line in found["lines"])


def test_out_gets_the_page_and_the_same_object(tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    assert run("fig5", "--out", str(out)) == 0
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "reproduce.json", "run.json"]
    printed = capsys.readouterr().out
    assert "Taken from the paper (1, 2):" in printed
    assert "True where communication is the bottleneck" in " ".join(printed.split())
    assert max(len(line) for line in printed.split("Report: ")[0].splitlines()) <= 80


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_chapters_that_were_done(tmp_path: Path, capsys, monkeypatch, signum, expected) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the suite was started under
    monkeypatch.setattr("lagom_overlap.papers.reproduce.cases", lambda *_, **__: signal.raise_signal(signum))
    out = tmp_path / "run"
    assert main(["reproduce", "all", "--json", "--out", str(out)]) == expected
    signal.signal(signal.SIGINT, before)
    said = capsys.readouterr()
    assert json.loads(said.out)["chapters"] == ["fig3", "fig5"]
    assert said.err == "lagom reproduce: interrupted; fig3, fig5 were done and are kept\n"
    assert json.loads((out / "reproduce.json").read_text()) == json.loads(said.out)
    assert main(["reproduce", "fig7"]) == expected
    assert capsys.readouterr().out == ""


def test_a_link_without_workers_is_refused() -> None:
    with pytest.raises(JobError, match="--link '3 Gbit/s' has no meaning without --backend workers"):
        run("fig3", "--link", "3 Gbit/s")


def test_a_link_that_is_none_is_named_as_the_flag_that_said_so() -> None:
    with pytest.raises(JobError, match=r"^--link: '3 Gbits' is not a link"):
        run("fig3", "--backend", "workers", "--link", "3 Gbits")


def test_a_folder_that_exists_and_an_unknown_figure_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="exists already"):
        run("fig5", "--out", str(tmp_path))
    with pytest.raises(
        UnknownNameError, match=r"did you mean 'fig8'.*allowed: all, convergence, data, equations, fig3"
    ):
        run("fig9", "--out", str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []
