"""`lagom_overlap.load` of runs that other tests do not make: a training job's files, infinities, what was cut off."""

import os
from dataclasses import dataclass
from math import inf
from pathlib import Path

import msgspec
import pytest
import tuned_job

import lagom_overlap
from lagom_overlap.collective import CommConfig
from lagom_overlap.errors import BundleError
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunProcess, RunRecord
from lagom_overlap.results.base import Result, Row, decoded, encoded
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.trace.chrome_writer import chrome_trace, read_timelines


@pytest.fixture
def online(tmp_path: Path) -> Path:
    return tuned_job.leave(tmp_path / "run")


def test_a_tuned_training_job_is_what_its_files_say(online: Path) -> None:
    run = lagom_overlap.load(online)
    assert isinstance(run, lagom_overlap.RunResult)
    assert (run.mode, run.command, run.world_size, run.model) == ("online", ("python", "train.py"), 2, "Net")
    assert [(each.state, each.num_settings, each.num_steps_left) for each in run.states] == [
        ("record", 0, 100),
        ("watch", 1, None),
    ]
    assert [(each.group, each.makespan_s, each.failure) for each in run.tried] == [
        ("g", 0.5, None),
        ("g", None, "no memory"),
    ]
    assert run.tried[1].configs == {"c": CommConfig(num_channels=2, chunk_bytes=4096)}
    assert run.tried[1].metric_h == {"c": 0.25}
    assert (run.num_steps, run.steps_s) == (90, (0.5, 0.25))  # the first three settle
    assert run.summary() == "result: 1 call site is set\nwhy: proven faster\nnext: lagom run"
    assert run.table()[1]["failure"] == "no memory"


def test_a_job_that_still_runs_has_no_conclusion(online: Path) -> None:
    lines = (online / "events.0.jsonl").read_text().splitlines()
    (online / "events.0.jsonl").write_text("\n".join(lines[:3]) + "\n")
    run = lagom_overlap.load(online)
    assert isinstance(run, lagom_overlap.RunResult)
    assert run.conclusion is None
    assert run.summary() == "lagom run, online: record: new job"


@pytest.mark.parametrize(
    ("num_events", "found", "line"),
    [
        (3, "nothing is decided, nothing was saved", "lagom run --online -- python train.py    # to its end"),
        (4, "nothing is set", "python train.py    # as it is"),
    ],
)
def test_a_job_that_was_killed_says_what_is_known_and_the_line_to_type(
    online: Path, num_events: int, found: str, line: str
) -> None:
    record = RunFolder.read(online).record
    this = RunProcess.this()
    if this is None:
        pytest.skip("this system does not tell when a process was started")
    gone = RunProcess(pid=this.pid, started=this.started - 1, boot=this.boot)
    RunFolder(online).write(msgspec.structs.replace(record, process=gone))
    lines = (online / "events.0.jsonl").read_text().splitlines()
    (online / "events.0.jsonl").write_text("\n".join(lines[:num_events]) + "\n")
    ending = lagom_overlap.load(online).conclusion
    assert ending.found == found
    assert ending.why.startswith("the job was cut off; its last state: ")
    assert ending.next_line.startswith(line)


@pytest.mark.parametrize("name", ["events.0.jsonl", "journal.0.jsonl"])
def test_a_damaged_file_is_named(online: Path, name: str) -> None:
    (online / name).write_text((online / name).read_text().partition("\n")[0] + "\n{]\n")
    with pytest.raises(BundleError, match="line 2"):
        lagom_overlap.load(online)


def test_what_has_not_ended_or_is_none_of_ours_says_so(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "cut", "cut").write(RunRecord.now(RunKind.TUNE, seed=0))
    with pytest.raises(BundleError, match="lagom tune that has not ended"):
        lagom_overlap.load(tmp_path / "cut")
    with pytest.raises(lagom_overlap.LagomError, match=r"no run folder: run\.json is missing"):
        lagom_overlap.load(tmp_path)
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(lagom_overlap.LagomError, match=r"no run folder: run\.json is no regular file"):
        lagom_overlap.load(tmp_path)
    with pytest.raises(lagom_overlap.LagomError, match="a path is empty"):
        lagom_overlap.load("")


def test_a_field_that_is_missing_or_of_another_type_is_named_with_who_wrote_it(tmp_path: Path) -> None:
    record = RunRecord.now(RunKind.COMPARE, seed=0)
    folder = RunFolder.create(tmp_path / "run", "run")
    folder.write(record, {"job": "small", "backend": "simulated", "seed": "zero", "rows": []})
    with pytest.raises(BundleError, match=r"written by version 0\.1\.0, cannot be typed: must be a whole number"):
        lagom_overlap.load(folder.path)
    folder.write(record, {"job": "small"})
    with pytest.raises(BundleError, match="missing required field backend"):
        lagom_overlap.load(folder.path)


@dataclass(frozen=True)
class Limits:
    error: float
    low: float | None


@dataclass(frozen=True)
class Made(Result):
    limits: tuple[Limits, ...]
    held_out: float | None

    def summary(self) -> str:
        return ""

    def table(self) -> list[Row]:
        return []


def test_what_json_has_no_word_for_is_infinite_again_and_an_absent_number_stays_absent() -> None:
    made = Made((Limits(inf, None),), None)
    assert b"null" in encoded(made.limits[0])
    assert decoded(Made, made.to_dict()) == made


def test_a_timeline_is_read_as_it_was_written_to_the_nanosecond() -> None:
    def span(name: str, stream: str, start_s: float, end_s: float, rank: int = 0) -> Span:
        return Span(name=name, kind=SpanKind.COMM, stream=stream, start_s=start_s, end_s=end_s, rank=rank)

    # Two at once on one stream, which the writer spreads over two threads; two ranks; a length of 0.
    both = Timeline((span("a", "x", 0.0, 2e-9), span("b", "x", 1e-9, 3e-9), span("c", "y", 0.25, 0.25, rank=3)))
    assert read_timelines(chrome_trace({"before": both, "after": Timeline(())})) == {
        "before": both,
        "after": Timeline(()),
    }
    with pytest.raises(BundleError, match="damaged"):
        read_timelines(b'{"traceEvents": []}')
