"""The result of tuning against figures worked out by hand."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields

import pytest
from stub_backend import Setting, StubBackend, assignment_of, job

from lagom_overlap.jobfile.job import Job
from lagom_overlap.results.tune import MeasuredSearch, Times, TuneResult, times_of
from lagom_overlap.tuners.journal import Entry, Step, StepKind
from lagom_overlap.tuners.problem import Assignment, Failure, Measurement, Outcome
from lagom_overlap.tuners.verdict import PairedRatio, Verdict

PROBLEMS = tuple(StubBackend({}).problem(group) for group in Job(job()).groups)
G, H = (problem.group.name for problem in PROBLEMS)


def run(makespan_s: float, comp_s: float, *comm_s: float) -> Measurement:
    return Measurement(makespan_s=makespan_s, comp_s=comp_s, comm_s=comm_s)


def entry(number: int, settings: dict[str, Setting], outcomes: dict[str, Outcome], arm: str | None = None) -> Entry:
    step = Step(
        number=number,
        kind=StepKind.SEARCH if arm is None else StepKind.VERDICT,
        assignments={name: assignment_of(setting) for name, setting in settings.items()},
        arm=arm,
        round=None if arm is None else 0,
    )
    return Entry(step=step, outcomes=outcomes)


def searched(entries: Sequence[Entry], recommended: Mapping[str, Assignment]) -> MeasuredSearch:
    return MeasuredSearch(problems=PROBLEMS, entries=tuple(entries), recommended=recommended)


def test_an_iteration_is_the_sum_of_the_medians_each_times_its_count():
    runs = {
        # Medians per field: makespan 3, computation 2, ag 6, rs 0.5
        G: [run(1, 9, 5, 0.5), run(3, 1, 6, 0.25), run(8, 2, 7, 1)],
        # 10, 4, 5
        H: [run(10, 4, 5)],
    }
    # 2 x 3 + 3 x 10; 2 x 2 + 3 x 4; collectives per call
    assert times_of(PROBLEMS, runs) == Times(makespan_s=36, comp_s=16, comm_s={"ag": 6, "rs": 0.5, "ar": 5})


def test_failed_runs_do_not_count_and_a_group_without_any_other_has_no_times():
    good, failed = run(1, 1, 1, 1), Failure("no")
    assert times_of(PROBLEMS, {G: [good, failed], H: [run(2, 1, 1), failed]}) == Times(
        makespan_s=2 * 1 + 3 * 2, comp_s=5, comm_s={"ag": 1, "rs": 1, "ar": 1}
    )
    assert times_of(PROBLEMS, {G: [good], H: [failed]}) is None
    assert times_of(PROBLEMS, {G: [good]}) is None
    assert times_of(PROBLEMS, {}) is None


def test_once_judged_only_the_runs_of_that_arm_count():
    same: dict[str, Setting] = {G: (2, 4), H: (4,)}
    entries = [
        entry(0, same, {G: run(100, 100, 100, 100), H: run(100, 100, 100)}),
        entry(1, same, {G: run(1, 1, 1, 1), H: run(1, 1, 1)}, arm="tuned"),
        entry(2, same, {G: run(50, 50, 50, 50), H: run(50, 50, 50)}, arm="default"),
        entry(3, same, {G: run(3, 3, 3, 3), H: run(5, 5, 5)}, arm="tuned"),
    ]
    assignments = {name: assignment_of(setting) for name, setting in same.items()}
    # Medians 2 and 3: 2 x 2 + 3 x 3
    assert searched(entries, assignments).times_under("tuned") == Times(
        makespan_s=13, comp_s=13, comm_s={"ag": 2, "rs": 2, "ar": 3}
    )
    assert searched(entries, assignments).times_under("default") == Times(
        makespan_s=250, comp_s=250, comm_s={"ag": 50, "rs": 50, "ar": 50}
    )


def test_without_a_verdict_the_searchs_runs_of_that_very_setting_count_group_by_group():
    entries = [
        entry(0, {G: (2, 4), H: (2,)}, {G: run(3, 1, 1, 1), H: run(70, 70, 70)}),
        entry(1, {G: (4, 4), H: (4,)}, {G: run(80, 80, 80, 80), H: run(5, 2, 1)}),
        entry(2, {G: (2, 4)}, {G: run(5, 3, 3, 3)}),
    ]
    found = searched(entries, {G: assignment_of((2, 4)), H: assignment_of((4,))}).times_under("tuned")
    # Medians 4 and 5: 2 x 4 + 3 x 5
    assert found == Times(makespan_s=23, comp_s=2 * 2 + 3 * 2, comm_s={"ag": 2, "rs": 2, "ar": 1})
    never = {G: assignment_of((2, 4)), H: assignment_of((None,))}
    assert searched(entries, never).times_under("tuned") is None


def result(recommended: Mapping[str, Assignment], entries: Sequence[Entry] = (), **changes: object) -> TuneResult:
    given: dict[str, object] = {
        "job": "toy",
        "backend": "simulated",
        "backend_description": "made up",
        "tuner": "exhaustive",
        "guarded": False,
        "seed": 0,
        "verdict": None,
        "repeats": 1,
        "date": "",
        "duration_s": 1.0,
    }
    return TuneResult(**(given | changes), measured=searched(entries, recommended))  # type: ignore[arg-type]


def test_configurations_stand_under_their_group_and_collective_in_order_knob_by_knob():
    found = result({G: assignment_of((2, 4)), H: assignment_of((None,))})
    channels = {group: {name: held.num_channels for name, held in row.items()} for group, row in found.configs.items()}
    assert channels == {"g": {"ag": 2, "rs": 4}, "h": {"ar": None}}
    knobs = ["algorithm", "protocol", "transport", "num_channels", "num_threads", "chunk_bytes"]
    assert list(json.loads(found.to_json())["configs"]["g"]["ag"]) == knobs


def test_what_is_printed_holds_no_journal_and_is_the_object():
    found = result({}, verdict=verdict())
    printed = json.loads(found.to_json())
    assert set(printed) == {field.name for field in fields(found)}
    assert printed["verdict"]["over_baselines"]["engine_default"]["median_ratio"] == 3
    assert printed["verdict"]["best_fixed"] == "fixed_max"


def test_the_frame_has_a_row_for_every_group_of_every_step():
    entries = [
        entry(0, {G: (2, 4), H: (2,)}, {G: run(3, 1, 1, 1), H: Failure("no room")}),
        entry(1, {G: (2, 4)}, {G: run(5, 3, 3, 3)}, arm="tuned"),
    ]
    first, failed, judged = result({G: assignment_of((2, 4))}, entries).table()
    assert (first["group"], first["makespan_s"], first["comm_s"], first["ag.num_channels"]) == (G, 3, 2, 2)
    assert (failed["group"], failed["failure"], failed["makespan_s"]) == (H, "no room", None)
    assert (failed["ar.num_channels"], failed["ag.num_channels"]) == (2, None)
    assert (judged["kind"], judged["arm"], judged["failure"]) == ("verdict", "tuned", None)
    assert first.keys() == failed.keys() == judged.keys()
    assert "ag.chunk_bytes" not in first, "nobody set it"


def test_a_data_frame_needs_pandas_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        result({}).to_frame()


def test_a_data_frame_is_the_table():
    pandas = pytest.importorskip("pandas")
    found = result({}, [entry(0, {G: (2, 4)}, {G: run(3, 1, 1, 1)})])
    assert isinstance(found.to_frame(), pandas.DataFrame)
    assert found.to_frame()["makespan_s"].tolist() == [3]


def test_a_notebook_shows_summary_and_table_and_escapes_what_is_data():
    found = result({}, [entry(0, {G: (2, 4)}, {G: Failure("<b>no</b>")})], job="<script>")
    page = found._repr_html_()
    assert "<p>&lt;script&gt;: No verdict" in page
    assert "<td>&lt;b&gt;no&lt;/b&gt;</td>" in page
    assert "<script>" not in page


def test_a_figure_needs_something_measured():
    with pytest.raises(ValueError, match="nothing was measured"):
        result({}).figure()
    measured = result({}, [entry(0, {G: (2, 4), H: (2,)}, {G: run(3, 1, 1, 1), H: run(1, 1, 1)})])
    assert measured.figure().data


def ratio(median_ratio: float) -> PairedRatio:
    return PairedRatio(
        num_pairs=5, median_ratio=median_ratio, q25=median_ratio - 0.5, q75=median_ratio + 0.25, num_wins=4
    )


def verdict() -> Verdict:
    return Verdict(
        over_default=ratio(2),
        over_baselines={"engine_default": ratio(3), "fixed_min": ratio(4), "fixed_max": ratio(5)},
        best_fixed="fixed_max",
        adopted=True,
        makespans_s={},
    )
