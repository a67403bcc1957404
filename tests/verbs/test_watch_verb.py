"""`lagom watch`: what it says of a run while that goes on, against the run itself; and when it ends."""

import json
from pathlib import Path

import msgspec
import pytest
import tuned_job
from stub_backend import SEARCHED, STEADY, StubBackend, in_turn, install, job

from lagom_overlap.cli import main
from lagom_overlap.cli.watch import follow
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunProcess, RunRecord
from lagom_overlap.tuners.journal import StepKind
from lagom_overlap.verbs.measure import RunProgress
from lagom_overlap.verbs.tune import TuneRequest, run_tune
from lagom_overlap.verbs.watch import look

GONE = RunProcess.this()
assert GONE is not None
GONE = RunProcess(pid=GONE.pid, started=GONE.started - 1, boot=GONE.boot)  # whose number is this process's now


@pytest.fixture
def online(tmp_path: Path) -> Path:
    return tuned_job.leave(tmp_path / "run")


def test_a_search_is_followed_measurement_by_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, StubBackend(in_turn(SEARCHED, STEADY)))
    seen: list[str] = []

    def observe(progress: RunProgress) -> None:
        watched = look(tmp_path / "run")
        assert not watched.is_over
        left = progress.num_planned - progress.num_done
        word = "search" if progress.phase is StepKind.SEARCH else "verdict"
        plural = "" if progress.num_done == 1 else "s"
        assert watched.now == f"{word}, {progress.num_done} measurement{plural}, at most {left} more"
        seen.append(watched.groups[0].line())

    run_tune(TuneRequest(job=Job(job()), out=tmp_path / "run"), observe)
    # 50 s untouched, then 5 s with 2 channels for both collectives, then 0.5 s with 2 and 4 (SEARCHED).
    assert seen[0] == "g: 1 tried, first 50.0 s, best 50.0 s (untouched)"
    assert seen[1] == "g: 2 tried, first 50.0 s, best 5.00 s (2 channels)"
    assert seen[-1].startswith("g: 5 tried, first 50.0 s, best 500 ms (2 settings)")
    watched = look(tmp_path / "run")
    assert watched.now == "ended"
    assert watched.ending[0].startswith("result: faster by the model, not measured")
    assert watched.ending[1].startswith("next: lagom show ")


def test_a_run_that_has_ended_shows_what_it_chose_not_the_smallest_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, StubBackend(in_turn(SEARCHED, STEADY)))
    run_tune(TuneRequest(job=Job(job()), out=tmp_path / "run"))
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["result"]["configs"]["g"] = {name: {"num_channels": 2} for name in record["result"]["configs"]["g"]}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    # 2 channels for both took 5 s (above), 2 and 4 took 0.5 s.
    assert "chosen 5.00 s (2 channels)" in look(tmp_path / "run").groups[0].line()


def test_a_training_job_says_its_state_steps_left_and_h_until_its_conclusion(
    online: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = online / "events.0.jsonl"
    lines = events.read_text().splitlines()[:5]
    events.write_text("\n".join(lines[:3]) + "\n")
    (online / "metrics.0.prom").write_text('# TYPE lagom_steps gauge\nlagom_steps{rank="0"} 50\n')
    num_waits = 0

    def wait(_: float) -> None:
        nonlocal num_waits
        num_waits += 1
        events.write_text("\n".join(lines[: 3 + num_waits // 2]) + "\n")

    follow(online, wait)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "lagom run, online: step 50: record, new job; call sites set: 0, at most 100 steps more",
        "  g: 2 tried, first 500 ms, best 500 ms (1 channels, 4 KiB chunk); H c 0.25",
        "lagom run, online: step 50: watch, proven faster; call sites set: 1",
        "lagom run, online: step 90: watch, proven faster; call sites set: 1",
        "result: 1 call site is set",
        "why: proven faster",
        "next: lagom run",
    ]
    assert num_waits == 4  # nothing is said twice


def test_a_run_whose_process_is_gone_ends_the_watching(online: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = RunFolder.read(online).record
    asked = {**record.request, "tuner": "lagom", "adapters": ["ddp", "calls"]}
    RunFolder(online).write(msgspec.structs.replace(record, process=GONE, request=asked))
    (online / "events.0.jsonl").write_text("")
    assert main(["watch", str(online)]) == 0
    said = capsys.readouterr().out
    assert "result: nothing is decided, nothing was saved\nwhy: the job was cut off\nnext: lagom run --online" in said
    assert "next: lagom run --online --tuner lagom --adapters ddp,calls -- " in said


def test_a_run_that_left_nothing_before_its_end_names_the_verb_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder.create(tmp_path / "plan", "plan").write(RunRecord.now(RunKind.PLAN, seed=0), json.loads("{}"))
    with pytest.raises(JobError, match="lagom show "):
        look(tmp_path / "plan")
    monkeypatch.chdir(tmp_path)
    assert main(["watch"]) == 2
    assert capsys.readouterr().err == (
        "lagom watch: no run of lagom tune or lagom run in this folder or in lagom-runs; name a run folder\n"
    )


def test_without_a_name_the_latest_run_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lagom-runs").mkdir()
    tuned_job.leave(tmp_path / "lagom-runs" / "run")
    assert main(["watch", "--once"]) == 0
    assert capsys.readouterr().out.startswith("lagom run, online: step 90: watch, proven faster; ")
