"""`lagom resume`: a search that was cut off ends as if it had not been, and what cannot go on says why."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from stub_backend import SEARCHED, STEADY, StubBackend, in_turn, install, job

import lagom_overlap
from lagom_overlap.cli import main
from lagom_overlap.errors import BundleError, JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunProcess, RunRecord
from lagom_overlap.results.tune import TuneResult
from lagom_overlap.tuners.journal import StepKind
from lagom_overlap.verbs.resume import held, resumed
from lagom_overlap.verbs.tune import TuneRequest, run_tune

NOISY = (
    '[job]\nname = "shapes"\n[cluster]\npreset = "a40_nvlink"\nnodes = 1\n[cost]\nnoise = 0.05\n'
    '[[group]]\nname = "g"\nop = [{ name = "a", memory = "64 KiB" }]\n'
    'comm = [{ name = "c", kind = "all_reduce", bytes = "1 MiB" }]\n'
    '[tune]\ntuner = "lagom"\npairs = 3\nseed = 3\nbudget = { measurements = 8 }\n'
)


def cut(folder: Path, num_lines: int, torn: str = "") -> None:
    """Leaves the folder as a kill would have after so many lines of the journal."""
    record = RunFolder.read(folder).record
    for path in folder.iterdir():
        if path.name != "measurements.jsonl":
            path.unlink()
    lines = (folder / "measurements.jsonl").read_text().splitlines()
    (folder / "measurements.jsonl").write_text("".join(f"{line}\n" for line in lines[:num_lines]) + torn)
    RunFolder(folder).write(msgspec.structs.replace(record, result=None))


def figures(result: TuneResult) -> object:
    entries = [replace(entry, outcomes=_bare(entry.outcomes)) for entry in result.search.entries]
    return result.configs, result.verdict, result.default, result.best, entries


def _bare(outcomes):
    return {name: replace(outcome, timeline=None) for name, outcome in outcomes.items()}


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is drawn elsewhere, and takes longer than the search."""
    monkeypatch.setattr("lagom_overlap.verbs.tune.render_tuning", lambda result: f"a page of {result.job}")


def test_a_noisy_search_that_was_killed_anywhere_ends_as_the_one_that_was_not(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(NOISY)
    request = TuneRequest(job=Job(read_job(tmp_path / "job.toml")), seed=11, out=tmp_path / "run")
    whole = run_tune(request)
    num_search = sum(entry.step.kind is StepKind.SEARCH for entry in whole.search.entries)
    for num_kept in (num_search - 2, num_search + 3):  # in the search; in the middle of a round of the verdict
        cut(tmp_path / "run", 1 + num_kept, torn='{"number": 5, "ki')
        done = run_tune(resumed(tmp_path / "run"))
        assert figures(done) == figures(whole)
        assert done.folder == tmp_path / "run"
        assert f"Resumed: an earlier process had made {num_kept} of the measurements." in done.notes
    loaded = lagom_overlap.load(tmp_path / "run")
    assert isinstance(loaded, TuneResult)
    assert figures(loaded) == figures(whole)


def test_of_a_machine_half_a_round_is_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backend = StubBackend(in_turn(SEARCHED, STEADY))
    install(monkeypatch, backend)
    request = TuneRequest(job=Job(job()), backend="gloo", out=tmp_path / "run")
    whole = run_tune(request)
    kinds = [(entry.step.kind, entry.step.round) for entry in whole.search.entries]
    second = kinds.index((StepKind.VERDICT, 1))
    cut(tmp_path / "run", 1 + second + 1)  # one contender of the second round was measured
    backend = StubBackend(STEADY)
    install(monkeypatch, backend)
    done = run_tune(resumed(tmp_path / "run"))
    assert done.num_measurements == whole.num_measurements
    assert f"Resumed: an earlier process had made {second} of the measurements." in done.notes
    groups = len(whole.search.problems)
    assert len(backend.calls) == groups * (len(done.search.entries) - second)


def test_another_job_machine_or_state_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(NOISY)
    run = tmp_path / "run"
    run_tune(TuneRequest(job=Job(read_job(tmp_path / "job.toml")), out=run))
    with pytest.raises(JobError, match=r"that has ended; .* --warm-start"):
        resumed(run)
    cut(run, 3)
    record = RunFolder.read(run).record
    RunFolder(run).write(msgspec.structs.replace(record, process=RunProcess.this()))
    with pytest.raises(JobError, match=r"still runs .*lagom watch"):
        resumed(run)
    elsewhere = {**record.machine, "cpu": "another"}
    RunFolder(run).write(msgspec.structs.replace(record, machine=elsewhere, request={"backend": "gloo"}))
    with pytest.raises(JobError, match=r"another machine .cpu another"):
        resumed(run)
    RunFolder(run).write(msgspec.structs.replace(record, request={"tuner": "random"}))
    with pytest.raises(BundleError, match="is not what this study would run"):
        run_tune(resumed(run))
    text = (run / "measurements.jsonl").read_text()
    head = msgspec.json.decode(text.splitlines()[0])
    changed = text.replace(head["job_fingerprint"], "0" * 64)
    assert changed != text
    (run / "measurements.jsonl").write_text(changed)
    RunFolder(run).write(record)
    with pytest.raises(BundleError, match="cannot be resumed: the job"):
        run_tune(resumed(run))
    assert (run / "measurements.jsonl").read_text() == changed  # nothing was written over it


def test_a_run_that_was_killed_before_or_after_all_measuring_is_whole_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(NOISY)
    run = tmp_path / "run"
    whole = run_tune(TuneRequest(job=Job(read_job(tmp_path / "job.toml")), out=run))
    cut(run, 0)
    (run / "measurements.jsonl").unlink()  # run.json alone was there
    assert figures(run_tune(resumed(run))) == figures(whole)
    for name in ("configs.toml", "report.html", "timeline.json"):  # run.json with the result was the last
        (run / name).unlink()
    assert main(["open", str(run)]) == 2
    assert f"lagom resume {run} writes one" in capsys.readouterr().err
    assert figures(run_tune(resumed(run))) == figures(whole)
    assert (run / "report.html").is_file()
    backend = StubBackend(in_turn(SEARCHED, STEADY))
    install(monkeypatch, backend)
    measured = run_tune(TuneRequest(job=Job(job()), backend="gloo", out=tmp_path / "measured"))
    (tmp_path / "measured" / "report.html").unlink()
    num_calls = len(backend.calls)
    assert figures(run_tune(resumed(tmp_path / "measured"))) == figures(measured)
    assert len(backend.calls) == num_calls, "nothing is measured again"


@pytest.mark.parametrize("kind", [kind for kind in RunKind if kind is not RunKind.TUNE])
def test_a_verb_that_cannot_go_on_says_what_to_type(kind: RunKind, tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", "run").write(RunRecord.now(kind, seed=0))
    with pytest.raises(
        JobError, match=re.escape(f"is a run of lagom {kind.words}, which cannot be resumed: ")
    ) as refused:
        resumed(tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert "type the command again" in str(refused.value) or "lagom run --online" in str(refused.value)


def test_a_process_is_gone_when_it_has_ended_and_not_before(tmp_path: Path) -> None:
    this = RunProcess.this()
    assert this is not None
    assert not this.is_gone
    assert RunProcess(pid=this.pid, started=this.started - 1, boot=this.boot).is_gone  # its number is another's now
    assert not RunProcess(pid=this.pid, started=0, boot="another machine").is_gone  # nobody knows
    code = "from lagom_overlap.jobfile.run_folder import RunProcess as R; p = R.this(); print(p.pid, p.started, p.boot)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert RunProcess(pid=int(told[0]), started=int(told[1]), boot=told[2]).is_gone


def test_two_that_resume_one_run_are_one_too_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held(tmp_path):
        assert main(["resume", str(tmp_path)]) == 2
    assert "is being resumed by another process: lagom watch" in capsys.readouterr().err
    assert main(["resume", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err
