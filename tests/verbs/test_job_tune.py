"""`lagom tune` with made-up times: the object that is printed, the report's data and the run folder."""

import contextlib
import json
import signal
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from chrome_timelines import timelines_from_chrome
from stub_backend import (
    BASELINES,
    JUDGED,
    SEARCHED,
    STEADY,
    TUNED_G,
    TUNED_H,
    UNTOUCHED_G,
    UNTOUCHED_H,
    Call,
    StubBackend,
    Times,
    assignment_of,
    in_turn,
    install,
    job,
    raising,
    spy,
)

from lagom_overlap import __version__
from lagom_overlap.cli import main
from lagom_overlap.errors import BackendError, OutputError, SpaceError, UnknownNameError
from lagom_overlap.jobfile.describe import OUT_OF_BUDGET
from lagom_overlap.jobfile.job import Job, PredictedJob, job_fingerprint
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.record import append_line, write_private
from lagom_overlap.results.tune import TuneResult
from lagom_overlap.tuners.bundle import parse_header
from lagom_overlap.tuners.journal import StepKind, entries_from_json
from lagom_overlap.verbs.tune import TuneRequest, run_tune

TIMES = in_turn(SEARCHED, JUDGED)
ADOPTED = in_turn(SEARCHED, STEADY)

SLOWER: Times = {
    **TIMES,
    # 2 g + 3 h: 8 against 20 in every round: what the search found was luck.
    ("g", UNTOUCHED_G): [50, 1],
    ("h", UNTOUCHED_H): [40, 2],
    ("g", TUNED_G): [0.5, 4],
    ("h", TUNED_H): [0.5, 4],
}

LEFT_ALONE = {"g": {"ag": {}, "rs": {}}, "h": {"ar": {}}}
"""configs.toml sets nothing."""


def tuned(monkeypatch, folder: Path, stub: StubBackend, *, request: dict[str, Any] | None = None, **tune) -> TuneResult:
    install(monkeypatch, stub)
    return run_tune(TuneRequest(job=Job(job(**tune)), out=folder / "run", **(request or {})))


def printed(result: TuneResult) -> dict[str, Any]:
    """The object as a reader of --json sees it."""
    return json.loads(result.to_json())


def configs_of(folder: Path) -> tuple[dict[str, Any], str]:
    """configs.toml, as data and without its data: the comments."""
    text = (folder / "run" / "configs.toml").read_text(encoding="utf-8")
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    return tomllib.loads(text), comments


def lines_of(folder: Path) -> list[str]:
    return (folder / "run" / "measurements.jsonl").read_text(encoding="utf-8").splitlines()


def calls_in(folder: Path) -> list[Call]:
    """What the measurements say was run, in order."""
    rows = [json.loads(line) for line in lines_of(folder)[1:]]
    return [
        Call(
            name,
            tuple(config["num_channels"] for config in group["configs"].values()),
            group["measured"]["makespan_s"],
        )
        for row in rows
        for name, group in row["groups"].items()
    ]


def auto(num_channels: int | None) -> dict[str, Any]:
    """A configuration as printed, with the channels set and nothing else."""
    names = ("algorithm", "protocol", "transport", "num_threads", "chunk_bytes")
    return {"num_channels": num_channels, **dict.fromkeys(names)}


def ratios(median_ratio: float, q25: float, q75: float, *, num_wins: int) -> dict[str, float]:
    return {"num_pairs": 3, "median_ratio": median_ratio, "q25": q25, "q75": q75, "num_wins": num_wins}


def test_every_figure_of_the_object_is_the_one_worked_out_by_hand(monkeypatch, tmp_path):
    found = printed(tuned(monkeypatch, tmp_path, StubBackend(TIMES), seed=7))
    notes, files = found.pop("notes"), found.pop("files")
    assert found.pop("machine").keys() >= {"cpu", "cores"}
    assert found.pop("versions")["python"]
    assert found.pop("date").endswith("Z")
    assert isinstance(found.pop("arm_words"), dict)
    assert notes
    assert all(isinstance(note, str) for note in notes)
    assert OUT_OF_BUDGET not in notes
    names = {"run.json", "configs.toml", "report.html", "timeline.json", "measurements.jsonl"}
    assert {Path(file) for file in files} == {tmp_path / "run" / name for name in names}
    assert all(Path(file).stat().st_size > 0 for file in files)
    assert found == {
        "tool": "lagom tune",
        "version": __version__,
        "seed": 7,
        "backend": "simulated",
        "tuner": "exhaustive",
        "guarded": False,
        "job": "toy job",
        "interrupted": False,
        "num_measurements": 5,
        # Medians over the rounds: g 2, h 4. Y is half of them; x a quarter and an eighth, per call.
        "default": {
            "makespan_s": 2 * 2 + 3 * 4,
            "comp_s": 2 * 1 + 3 * 2,
            "comm_s": {"ag": 0.5, "rs": 0.25, "ar": 1},
        },
        # g 1, h 2
        "best": {
            "makespan_s": 2 * 1 + 3 * 2,
            "comp_s": 2 * 0.5 + 3 * 1,
            "comm_s": {"ag": 0.25, "rs": 0.125, "ar": 0.5},
        },
        "configs": {"g": {"ag": auto(2), "rs": auto(4)}, "h": {"ar": auto(4)}},
        "launches": {},
        "repeats": 1,
        "step_s": None,
        "tuned_step_s": None,
        "group_steps_s": {},
        "num_stages": 1,
        "predicted": None,
        "backend_description": "stub: times that are made up",
        "duration_s": 42,
        "verdict": {
            # 6, 28, 20 over 8, 8, 10: ratios 0.75, 3.5, 2
            "over_default": ratios(2, (0.75 + 2) / 2, (2 + 3.5) / 2, num_wins=2),
            "over_baselines": {
                # 9, 12, 20 over 8, 8, 10: ratios 1.125, 1.5, 2
                "engine_default": ratios(1.5, (1.125 + 1.5) / 2, (1.5 + 2) / 2, num_wins=3),
                "fixed_min": ratios(2.5, 2.25, 2.5, num_wins=3),
                # 14, 16, 15 over 8, 8, 10: ratios 1.75, 2, 1.5; all knobs minimal took 20
                "fixed_max": ratios(1.75, (1.5 + 1.75) / 2, (1.75 + 2) / 2, num_wins=3),
            },
            "best_fixed": "fixed_max",
            "adopted": False,
            "judgement": {
                "decision": "no difference",
                "num_pairs": 3,
                "ratio": pytest.approx(2),
                "low": 0.0,
                "high": None,
                "noise": 0.0,
                "alpha": 0.01,
                "min_effect": 0.005,
            },
            "makespans_s": {
                "default": [6, 28, 20],
                "engine_default": [9, 12, 20],
                "fixed_min": [20, 20, 20],
                "fixed_max": [14, 16, 15],
                "tuned": [8, 8, 10],
            },
            "failures": {},
        },
    }


def test_the_run_record_holds_the_same_object_and_the_whole_duration(monkeypatch, tmp_path):
    stub = StubBackend(TIMES)
    result = tuned(monkeypatch, tmp_path, stub)
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["result"] == printed(result)
    assert record["job"]["job"]["name"] == "toy job"
    # One second each: 5 of g and 3 of h in the search, a pair of the default and three rounds of five arms
    # over two groups.
    assert record["result"]["duration_s"] == result.duration_s == len(stub.calls) == 5 + 3 + 2 * 2 + 3 * 5 * 2
    assert "from_trace" not in record
    assert (tmp_path / "run" / "report.html").read_text(encoding="utf-8") == "a page of toy job"


def test_the_report_gets_the_same_run(monkeypatch, tmp_path):
    report = tuned(monkeypatch, tmp_path, StubBackend(TIMES), seed=7, repeats=3)
    assert (report.job, report.backend, report.tuner, report.guarded) == ("toy job", "simulated", "exhaustive", False)
    assert (report.seed, report.repeats, report.interrupted) == (7, 3, False)
    assert report.backend_description == "stub: times that are made up"
    assert dict(report.search.recommended) == {"g": assignment_of(TUNED_G), "h": assignment_of(TUNED_H)}
    assert [problem.group.name for problem in report.search.problems] == ["g", "h"]
    assert [entry.step.kind for entry in report.search.entries] == [StepKind.SEARCH] * 5 + [StepKind.VERDICT] * 17
    assert report.verdict is not None
    assert report.verdict.makespans_s["default"] == (6, 28, 20)
    assert report.verdict.makespans_s["tuned"] == (8, 8, 10)


def test_before_is_the_default_and_after_is_tuned_both_of_the_last_round(monkeypatch, tmp_path):
    report = tuned(monkeypatch, tmp_path, StubBackend(TIMES))
    before, after = (report.search.timelines_under(arm) for arm in ("default", "tuned"))
    assert {name: line.makespan_s for name, line in before.items()} == {"g": 4, "h": 4}
    assert {name: line.makespan_s for name, line in after.items()} == {"g": 2, "h": 2}
    stored = timelines_from_chrome((tmp_path / "run" / "timeline.json").read_bytes())
    assert {name: round(line.makespan_s, 6) for name, line in stored.items()} == {
        "before: g": 4,
        "before: h": 4,
        "after: g": 2,
        "after: h": 2,
    }


def test_every_measurement_is_on_disk_before_the_next_step_begins(monkeypatch, tmp_path):
    stub = StubBackend(TIMES)
    seen: list[tuple[int, int]] = []
    stub.before_call = lambda number: seen.append((number, len(lines_of(tmp_path))))
    tuned(monkeypatch, tmp_path, stub)
    # Three steps of both groups, two of g alone, seventeen of both; the header is the first line.
    calls_of_step = [2, 2, 2, 1, 1, *[2] * 17]
    assert [lines for _, lines in seen] == [
        1 + step for step, num_calls in enumerate(calls_of_step) for _ in range(num_calls)
    ]
    assert len(lines_of(tmp_path)) == 1 + 22


def test_the_measurements_are_what_the_backend_was_asked_and_answered(monkeypatch, tmp_path):
    stub = StubBackend(TIMES)
    result = tuned(monkeypatch, tmp_path, stub)
    assert calls_in(tmp_path) == stub.calls
    lines = lines_of(tmp_path)
    kept = entries_from_json(lines[1:], result.search.problems, first_line=2)
    assert [entry.step for entry in kept] == [entry.step for entry in result.search.entries]


def test_the_header_names_job_backend_and_what_was_compared(monkeypatch, tmp_path):
    tuned(monkeypatch, tmp_path, StubBackend(TIMES))
    header = parse_header(lines_of(tmp_path)[0], "here")
    spec = job()
    assert header.job_fingerprint == job_fingerprint(spec, Job(spec).groups)
    assert header.backend == "simulated"
    assert {name: group.comms for name, group in header.groups.items()} == {"g": ("ag", "rs"), "h": ("ar",)}
    assert header.groups["g"].default == assignment_of(UNTOUCHED_G)
    assert {name: config[0].num_channels for name, config in header.groups["h"].baselines.items()} == BASELINES


def test_an_adopted_verdict_deploys_the_tuned_knobs(monkeypatch, tmp_path):
    tuned(monkeypatch, tmp_path, StubBackend(ADOPTED))
    configs, comments = configs_of(tmp_path)
    assert configs == {
        "adopted": True,
        "groups": {"g": {"ag": {"num_channels": 2}, "rs": {"num_channels": 4}}, "h": {"ar": {"num_channels": 4}}},
    }
    assert comments
    assert "nothing is set" not in comments
    assert "adopted = false" not in comments


def test_a_refused_verdict_deploys_no_knob_and_says_so(monkeypatch, tmp_path):
    found = printed(tuned(monkeypatch, tmp_path, StubBackend(SLOWER)))
    configs, comments = configs_of(tmp_path)
    assert configs == {"adopted": False, "groups": LEFT_ALONE}
    assert "nothing is set" in comments
    # What the tuner stands by is still told, with the times that speak against it.
    assert found["configs"] == {"g": {"ag": auto(2), "rs": auto(4)}, "h": {"ar": auto(4)}}
    assert found["verdict"]["adopted"] is False
    assert found["verdict"]["over_default"]["median_ratio"] == 0.4
    assert (found["default"]["makespan_s"], found["best"]["makespan_s"]) == (8, 20)


def test_a_default_that_is_spelled_out_is_deployed_by_neither_verdict(monkeypatch, tmp_path):
    # The default is 3 channels instead of none set; h finds nothing better than it, g does.
    spelled: dict[str, Any] = {"default": 3, "baselines": {}}
    common: Times = {("g", (2, 2)): [9], ("g", (4, 2)): [9], ("g", (4, 4)): [9], ("h", (2,)): [9], ("h", (4,)): [9]}
    better: Times = {**common, ("g", (3, 3)): [2], ("g", (2, 4)): [1], ("h", (3,)): [1]}
    for name in ("adopted", "refused"):
        (tmp_path / name).mkdir()
    tuned(monkeypatch, tmp_path / "adopted", StubBackend(better, **spelled))
    configs, _ = configs_of(tmp_path / "adopted")
    assert configs == {
        "adopted": True,
        "groups": {"g": {"ag": {"num_channels": 2}, "rs": {"num_channels": 4}}, "h": {"ar": {}}},
    }
    worse = {**better, ("g", (2, 4)): [1, 5]}
    found = printed(tuned(monkeypatch, tmp_path / "refused", StubBackend(worse, **spelled)))
    assert configs_of(tmp_path / "refused")[0] == {"adopted": False, "groups": LEFT_ALONE}
    assert found["verdict"]["over_baselines"] == {}
    assert found["verdict"]["best_fixed"] is None


def test_the_seconds_of_the_job_end_the_search_and_a_note_says_so(monkeypatch, tmp_path):
    found = printed(
        tuned(monkeypatch, tmp_path, StubBackend(TIMES), budget={"measurements": 40, "seconds": 3}, tuner="exhaustive")
    )
    # Two steps of two seconds each; then the verdict runs in full.
    assert found["num_measurements"] == 2
    assert found["verdict"]["over_default"]["num_pairs"] == 3
    assert OUT_OF_BUDGET in found["notes"]
    assert len(lines_of(tmp_path)) == 1 + 2 + 17


def test_the_measurements_of_the_job_end_the_search_and_a_note_says_so(monkeypatch, tmp_path):
    found = printed(tuned(monkeypatch, tmp_path, StubBackend(TIMES), budget={"measurements": 3, "seconds": 1000}))
    assert found["num_measurements"] == 3
    assert OUT_OF_BUDGET in found["notes"]
    assert len(lines_of(tmp_path)) == 1 + 3 + 17


def test_rounds_go_on_to_the_jobs_limit_while_nothing_is_decided(monkeypatch, tmp_path):
    # After three rounds that vary every round is alike, and tuned is faster: seven wins could be reached by then.
    found = printed(tuned(monkeypatch, tmp_path, StubBackend(TIMES), pairs=40))
    num = found["verdict"]["over_default"]["num_pairs"]
    assert 7 < num < 40
    assert found["verdict"]["judgement"]["num_pairs"] == num
    assert len(lines_of(tmp_path)) == 1 + 5 + 2 + 5 * num


def test_the_guard_runs_if_the_job_asks_for_it(monkeypatch, tmp_path):
    stub = StubBackend(TIMES)
    found = printed(tuned(monkeypatch, tmp_path, stub, tuner="fixed_min", guard=True))
    assert found["guarded"] is True
    # The default first, as the incumbent, then the one setting: fixed_min alone would measure once.
    assert found["num_measurements"] == 2
    assert stub.calls[0].setting == UNTOUCHED_G


def test_ctrl_c_in_the_search_keeps_what_was_measured_and_judges_nothing(monkeypatch, tmp_path):
    # The fourth step is asked for and never answered.
    stub = StubBackend(TIMES, before_call=raising(KeyboardInterrupt(), 6))
    result = tuned(monkeypatch, tmp_path, stub)
    found = printed(result)
    assert found["interrupted"] is True
    assert result.interrupted is True
    assert found["verdict"] is None
    assert result.verdict is None
    assert found["num_measurements"] == 3
    # The search's own times: 50 and 40 untouched, 0.5 and 0.5 of the best so far.
    assert found["default"]["makespan_s"] == 2 * 50 + 3 * 40
    assert found["best"] == {
        "makespan_s": 2 * 0.5 + 3 * 0.5,
        "comp_s": 2 * 0.25 + 3 * 0.25,
        "comm_s": {"ag": 0.125, "rs": 0.0625, "ar": 0.125},
    }
    assert found["configs"]["h"] == {"ar": auto(4)}
    assert calls_in(tmp_path) == stub.calls
    assert len(lines_of(tmp_path)) == 1 + 3
    configs, comments = configs_of(tmp_path)
    assert configs == {"adopted": False, "groups": LEFT_ALONE}
    assert comments
    assert (tmp_path / "run" / "report.html").read_text(encoding="utf-8") == "a page of toy job"
    assert timelines_from_chrome((tmp_path / "run" / "timeline.json").read_bytes()) == {}
    assert stub.num_closed == 1


def test_ctrl_c_in_a_step_drops_that_step_and_in_the_first_one_leaves_no_times(monkeypatch, tmp_path):
    # g is measured, h is not.
    found = printed(tuned(monkeypatch, tmp_path, StubBackend(TIMES, before_call=raising(KeyboardInterrupt(), 1))))
    assert found["num_measurements"] == 0
    assert found["default"] is None
    assert found["best"] is None
    assert found["verdict"] is None
    assert len(lines_of(tmp_path)) == 1


def test_ctrl_c_in_the_verdict_gives_no_verdict_and_deploys_nothing(monkeypatch, tmp_path):
    # 8 measurements of the search, one whole round of five arms, three arms of the next.
    stub = StubBackend(TIMES, before_call=raising(KeyboardInterrupt(), 8 + 10 + 6))
    found = printed(tuned(monkeypatch, tmp_path, stub))
    assert found["interrupted"] is True
    assert found["verdict"] is None
    assert found["num_measurements"] == 5
    assert len(lines_of(tmp_path)) == 1 + 5 + 8
    assert configs_of(tmp_path)[0] == {"adopted": False, "groups": LEFT_ALONE}


def test_a_machine_that_fails_leaves_what_was_measured_before(monkeypatch, tmp_path):
    stub = StubBackend(TIMES, before_call=raising(BackendError("rank 1 is gone"), 5))
    with pytest.raises(BackendError, match="rank 1 is gone"):
        tuned(monkeypatch, tmp_path, stub)
    # Two whole steps; of the third only g was measured.
    assert len(lines_of(tmp_path)) == 1 + 2
    assert calls_in(tmp_path) == stub.calls[:4]
    assert stub.num_closed == 1
    record = json.loads((tmp_path / "run" / "run.json").read_bytes())
    assert not record.keys() & {"result", "process"}  # lagom resume goes on from here


def test_a_folder_that_exists_is_refused_and_left_as_it_is(monkeypatch, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine", encoding="utf-8")
    stub = StubBackend(TIMES)
    with pytest.raises(OutputError, match="exists already"):
        tuned(monkeypatch, tmp_path, stub)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine.txt"]
    assert stub.opened_as is None


def test_a_tuner_that_does_not_exist_is_refused_before_the_backend_is_opened(monkeypatch, tmp_path):
    stub = StubBackend(TIMES)
    with pytest.raises(UnknownNameError, match=r"fixed_mim.*did you mean 'fixed_min'"):
        tuned(monkeypatch, tmp_path, stub, tuner="fixed_mim")
    assert stub.opened_as is None
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_the_results_are_written_waits_until_they_are(monkeypatch, tmp_path):
    def page(_report: object) -> str:
        signal.raise_signal(signal.SIGINT)
        return "a page"

    install(monkeypatch, StubBackend(TIMES))
    monkeypatch.setattr("lagom_overlap.verbs.tune.render_tuning", page)
    try:
        result = run_tune(TuneRequest(job=Job(job()), out=tmp_path / "run"))
    except KeyboardInterrupt:
        pytest.fail("the results were cut off")
    assert result.interrupted is False
    assert all(Path(file).exists() for file in result.files)


def test_what_others_read_is_written_before_the_page_is_made(monkeypatch, tmp_path):
    def page(_result: TuneResult) -> str:
        made.update(path.name for path in (tmp_path / "run").iterdir())
        return "a page"

    made: set[str] = set()
    install(monkeypatch, StubBackend(TIMES))
    monkeypatch.setattr("lagom_overlap.verbs.tune.render_tuning", page)
    run_tune(TuneRequest(job=Job(job()), out=tmp_path / "run"))
    assert made == {"configs.toml", "run.json", "measurements.jsonl"}


@pytest.mark.parametrize("names", [{"report.html"}, {"configs.toml", "run.json", "report.html", "timeline.json"}])
def test_a_disk_that_is_full_at_the_end_costs_files_and_no_verdict(monkeypatch, tmp_path, capsys, caplog, names):
    def write(path: Path, content: bytes) -> None:
        if path.name in names:
            raise OutputError(f"cannot write {path.name!r}: No space left on device")
        write_private(path, content)

    install(monkeypatch, StubBackend(ADOPTED))
    monkeypatch.setattr("lagom_overlap.jobfile.run_folder.write_private", write)
    monkeypatch.setattr("lagom_overlap.cli.tune.JobVariants.read", lambda *_, **__: SimpleNamespace(one=job))
    assert main(["tune", "job.toml", "--out", str(tmp_path / "run"), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"]["adopted"] is True
    written = {path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")}
    assert {Path(name).name for name in found["files"]} == written
    assert written == {"configs.toml", "run.json", "report.html", "timeline.json", "measurements.jsonl"} - names
    assert "report.html': No space left on device" in caplog.text


def test_a_disk_that_is_full_while_measuring_ends_no_run(monkeypatch, tmp_path, caplog):
    def append(path: Path, line: str) -> None:
        if len(lines_of(tmp_path)) == 4:
            raise OutputError("cannot write the measurements: No space left on device")
        append_line(path, line)

    monkeypatch.setattr("lagom_overlap.verbs.measure.append_line", append)
    result = tuned(monkeypatch, tmp_path, StubBackend(TIMES))
    assert result.verdict is not None
    assert len(lines_of(tmp_path)) == 4
    assert caplog.text.count("measurements are no longer written") == 1
    assert "measurements.jsonl" not in {path.name for path in result.files}


def test_ranks_that_the_signal_has_ended_before_us_are_no_failure_of_the_machine(monkeypatch, tmp_path, capsys):
    def both(number: int) -> None:
        if number == 6:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            raise BackendError("rank 1 was killed by SIGTERM")

    install(monkeypatch, StubBackend(TIMES, before_call=both))
    monkeypatch.setattr("lagom_overlap.cli.tune.JobVariants.read", lambda *_, **__: SimpleNamespace(one=job))
    assert main(["tune", "job.toml", "--out", str(tmp_path / "run"), "--json"]) == 143
    found = json.loads(capsys.readouterr().out)
    assert found["interrupted"] is True
    assert found["num_measurements"] == 3
    assert json.loads((tmp_path / "run" / "run.json").read_text())["result"]["interrupted"] is True


def test_without_a_folder_each_run_gets_its_own_below_lagom_runs_under_the_jobs_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lagom_overlap.jobfile.run_folder.utc_now", lambda: "2026-01-02T03:04:05Z")
    for name in ("toy-job-20260102T030405Z", "toy-job-20260102T030405Z-2"):
        install(monkeypatch, StubBackend(TIMES))
        result = run_tune(TuneRequest(job=Job(job())))
        assert result.folder == Path("lagom-runs") / name
        assert (tmp_path / result.folder / "run.json").exists()


def test_what_the_request_says_comes_before_the_job(monkeypatch, tmp_path):
    stub = StubBackend(TIMES)
    said = {"backend": "gloo", "tuner": "fixed_min", "seed": 0}
    found = printed(tuned(monkeypatch, tmp_path, stub, request=said, seed=9, options={"limit": 3}))
    # The options are those of the job's tuner and stay with it.
    assert (found["backend"], found["tuner"], found["seed"]) == ("gloo", "fixed_min", 0)
    assert stub.opened_as == "gloo"
    assert stub.request is not None
    assert stub.request.seed == 0
    assert found["configs"] == {"g": {"ag": auto(2), "rs": auto(2)}, "h": {"ar": auto(2)}}


def test_the_jobs_options_reach_its_tuner_and_a_wrong_one_makes_no_folder(monkeypatch, tmp_path):
    stub = StubBackend(TIMES)
    with pytest.raises(SpaceError, match="exhaustive search tries at most 3"):
        tuned(monkeypatch, tmp_path, stub, options={"limit": 3})
    assert not (tmp_path / "run").exists()
    assert stub.num_closed == 1


def test_the_seed_orders_the_rounds_and_reaches_the_tuner(monkeypatch, tmp_path):
    def order(name: str, seed: int) -> list[str | None]:
        (tmp_path / name).mkdir()
        report = tuned(monkeypatch, tmp_path / name, StubBackend(TIMES), seed=seed)
        return [entry.step.arm for entry in report.search.entries]

    seeds = spy(monkeypatch, "lagom_overlap.verbs.tune.make_tuner", "seed")
    assert order("a", 1) == order("b", 1)
    assert order("c", 1) != order("d", 2)
    assert seeds == [1, 1, 1, 2]


class Origin(msgspec.Struct, frozen=True):
    """Where groups came from."""

    trace: str


def test_a_predicted_job_is_tuned_on_the_traces_groups_and_backend(monkeypatch, tmp_path):
    install(monkeypatch, StubBackend({}))
    stub = StubBackend(TIMES)
    predicted = PredictedJob(
        spec=job(),
        traced=Job(job()).groups[1:],
        backend=stub,
        caveats=("predicted",),
        default_words="as traced",
        trace_record=Origin("rank0.json"),
    )
    result = run_tune(TuneRequest(job=predicted, out=tmp_path / "run"))
    found = printed(result)
    assert list(found["configs"]) == ["h"]
    ended = "Tuner exhaustive stopped by itself after 3 of the 40 measurements of [tune] budget."  # of 3 settings
    assert (found["backend"], found["notes"]) == ("predicted_from_trace", ["predicted", ended])
    assert result.arm_words == {"default": "as traced"}
    # Only h, three times an iteration, medians of 1, 8, 4 and 2, 2, 2.
    assert (found["default"]["makespan_s"], found["best"]["makespan_s"]) == (3 * 4, 3 * 2)
    assert json.loads((tmp_path / "run" / "run.json").read_bytes())["from_trace"] == {"trace": "rank0.json"}
    assert stub.num_closed == 1


SIMULATED = {
    "job": {"name": "simulated"},
    "cluster": {"preset": "a40_nvlink"},
    "group": [
        {
            "name": "g",
            "block": {"seq_len": 2048, "hidden": 2560, "heads": 32, "ffn": 10240, "batch": 2},
            "comm": [{"name": "ag", "kind": "all_gather", "bytes": "900 MiB"}],  # so long that tuning gains 1 %
        },
        {
            "name": "h",
            "op": [{"name": "mm", "gemm": [64, 64, 64]}],
            "comm": [{"name": "rs", "kind": "reduce_scatter", "bytes": "256 MiB"}],
        },
    ],
    "tune": {"guard": False, "pairs": 3},
}
"""The computation is longer in g, the communication in h; the simulator spells its default out."""


def simulated(folder: Path, names: tuple[str, ...], **tune: object) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(json.dumps(SIMULATED))
    raw["group"] = [group for group in raw["group"] if group["name"] in names]
    raw["tune"].update(tune)
    return printed(run_tune(TuneRequest(job=Job(parse_job(raw, "job.toml")), out=folder / "run")))


def test_on_the_simulator_minimal_resources_for_a_lone_collective_are_refused_and_nothing_is_set(tmp_path):
    found = simulated(tmp_path, ("h",), tuner="fixed_min")
    assert found["verdict"]["adopted"] is False
    assert found["verdict"]["over_default"]["median_ratio"] < 1
    assert found["default"]["makespan_s"] < found["best"]["makespan_s"]
    configs, comments = configs_of(tmp_path)
    assert configs == {"adopted": False, "groups": {"h": {"rs": {}}}}
    assert "nothing is set" in comments


def test_on_the_simulator_a_default_that_stays_is_refused_and_nothing_is_set(tmp_path):
    found = simulated(tmp_path, ("g", "h"), tuner="default")
    assert found["verdict"]["adopted"] is False
    assert found["configs"]["g"]["ag"]["num_channels"] is not None
    assert configs_of(tmp_path)[0] == {"adopted": False, "groups": {"g": {"ag": {}}, "h": {"rs": {}}}}


def test_on_the_simulator_an_adopted_setting_is_deployed_knob_by_knob(tmp_path):
    found = simulated(tmp_path, ("g",), tuner="exhaustive", space={"num_channels": [2, 8], "chunk_bytes": ["2 MiB"]})
    assert found["verdict"]["adopted"] is True
    assert found["verdict"]["over_default"]["median_ratio"] > 1
    configs, comments = configs_of(tmp_path)
    knobs = {name: value for name, value in found["configs"]["g"]["ag"].items() if value is not None}
    assert knobs["num_channels"] == 2
    assert configs == {"adopted": True, "groups": {"g": {"ag": knobs}}}
    assert "nothing is set" not in comments
    assert "<html" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
