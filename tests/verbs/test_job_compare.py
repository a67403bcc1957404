"""`lagom compare` with made-up times: every figure of the table against one worked out by hand."""

from pathlib import Path
from typing import Any

import pytest
from stub_backend import (
    JUDGED,
    SEARCHED,
    TUNED_G,
    TUNED_H,
    UNTOUCHED_G,
    UNTOUCHED_H,
    Setting,
    StubBackend,
    Times,
    assignment_of,
    in_turn,
    install,
    job,
    raising,
    spy,
)

from lagom_overlap.api import load_job
from lagom_overlap.errors import BackendError, JobError, SpaceError, UnknownNameError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.results.compare import CompareResult
from lagom_overlap.tuners.warm_start import WarmStart
from lagom_overlap.verbs import compare as compare_module
from lagom_overlap.verbs.compare import COLD, CompareRequest, IterationTimes, measured_rounds, search
from lagom_overlap.verbs.compare import run_compare as run_request

MINIMAL: Times = {
    ("g", (2, 2)): [5.0],
    ("h", (2,)): [6.0],
}
"""The search of fixed_min."""

ROUNDS: Times = {
    **JUDGED,
    # No pair of the default comes first here: 6, 28, 20
    ("g", UNTOUCHED_G): [1.5, 2, 4],
    ("h", UNTOUCHED_H): [1, 8, 4],
    # 20, 14, 20
    ("g", (2, 2)): [4, 4, 4],
    ("h", (2,)): [4, 2, 4],
}
TIMES = in_turn(SEARCHED, MINIMAL, ROUNDS)
TUNERS = ["exhaustive", "fixed_min"]


def run_compare(spec: JobSpec, tuners: list[str], note=lambda _: None, **asked: Any) -> CompareResult:
    return run_request(CompareRequest(job=Job(spec), tuners=tuners, **asked), note)


def rows_of(monkeypatch, stub: StubBackend, tuners: list[str], **tune: object) -> dict[str, dict[str, float]]:
    install(monkeypatch, stub)
    result = run_compare(job(**tune), tuners).to_dict()
    assert result["job"] == "toy job"
    assert [row["tuner"] for row in result["rows"]] == tuners
    for row in result["rows"]:
        assert row.pop("step_s") is None, "a stub has no price of a step"
        interval = row.pop("speedup_interval")
        assert (interval is None) == (tune.get("pairs", 3) < 6), "three rounds are too few for an interval"
    return {row.pop("tuner"): row for row in result["rows"]}


def test_each_row_holds_the_median_iteration_the_paired_speedup_and_the_regret(monkeypatch):
    stub = StubBackend(TIMES)
    rows = rows_of(monkeypatch, stub, TUNERS, guard=True)
    # Iterations 2 g + 3 h of the default: 6, 28, 20; of exhaustive's result: 8, 8, 10; of fixed_min's: 20, 14, 20.
    assert rows == {
        # Ratios 0.75, 3.5, 2; of the medians it would be 2.5.
        "exhaustive": {"num_measurements": 5, "makespan_s": 8, "speedup_over_default": 2, "regret_over_best": 0},
        # Ratios 0.3, 2, 1; 20 over 8 is 1.5 more.
        "fixed_min": {"num_measurements": 1, "makespan_s": 20, "speedup_over_default": 1, "regret_over_best": 1.5},
    }
    assert stub.num_closed == 1
    # 8 for exhaustive's search, 2 for fixed_min's, then three rounds of three arms over two groups
    assert len(stub.calls) == 8 + 2 + 3 * 3 * 2


def test_the_rows_come_in_the_order_asked_for(monkeypatch):
    times = in_turn(MINIMAL, SEARCHED, ROUNDS)
    rows = rows_of(monkeypatch, StubBackend(times), TUNERS[::-1])
    assert rows["exhaustive"]["makespan_s"] == 8
    assert rows["fixed_min"]["makespan_s"] == 20


def test_the_best_of_the_tuners_has_no_regret_even_if_the_default_is_faster(monkeypatch):
    times: Times = {("g", UNTOUCHED_G): [1], ("h", UNTOUCHED_H): [1], ("g", (2, 2)): [2], ("h", (2,)): [2]}
    rows = rows_of(monkeypatch, StubBackend(times), ["fixed_min"])
    assert rows["fixed_min"] == {
        "num_measurements": 1,
        "makespan_s": 2 * 2 + 3 * 2,
        "speedup_over_default": 0.5,
        "regret_over_best": 0,
    }


def test_as_many_rounds_are_run_as_the_job_wants_pairs(monkeypatch):
    stub = StubBackend(TIMES)
    rows_of(monkeypatch, stub, ["fixed_min"], pairs=7)
    assert len(stub.calls) == 2 + 7 * 2 * 2
    assert stub.settings_of("g").count(UNTOUCHED_G) == 7


def test_the_interval_is_that_of_the_ratios_order(monkeypatch):
    # Ratios default over fixed_min of 7 rounds: 1 to 7; the 95 % interval of a median of 7 is the whole range.
    times: Times = {
        ("g", UNTOUCHED_G): [number / 5 for number in range(1, 8)],
        ("h", UNTOUCHED_H): [number / 5 for number in range(1, 8)],
        ("g", (2, 2)): [0.2],
        ("h", (2,)): [0.2],
    }
    install(monkeypatch, StubBackend(times))
    (row,) = run_compare(job(pairs=7), ["fixed_min"]).rows
    assert row.speedup_over_default == pytest.approx(4)
    assert row.speedup_interval == pytest.approx((1, 7))


def test_the_number_of_measurements_bounds_each_search(monkeypatch):
    stub = StubBackend(TIMES)
    rows = rows_of(monkeypatch, stub, TUNERS, budget={"measurements": 3, "seconds": 1000})
    assert {name: row["num_measurements"] for name, row in rows.items()} == {"exhaustive": 3, "fixed_min": 1}


def test_the_seconds_bound_each_search_by_itself(monkeypatch):
    # Exhaustive's steps take two seconds; fixed_min still finds its own three seconds after them.
    stub = StubBackend(TIMES)
    rows = rows_of(monkeypatch, stub, TUNERS, budget={"measurements": 40, "seconds": 3})
    assert {name: row["num_measurements"] for name, row in rows.items()} == {"exhaustive": 2, "fixed_min": 1}


def test_options_are_for_the_jobs_own_tuner_alone(monkeypatch):
    rows_of(monkeypatch, StubBackend(TIMES), ["fixed_min"], options={"limit": 3})
    stub = install(monkeypatch, StubBackend(TIMES))
    with pytest.raises(SpaceError, match="exhaustive search tries at most 3"):
        run_compare(job(options={"limit": 3}), ["fixed_min", "exhaustive"])
    assert stub.num_closed == 1


def test_a_result_that_cannot_run_is_an_error_with_its_tuners_name(monkeypatch):
    times = {**TIMES, ("h", (2,)): [6.0, 0.0]}
    stub = install(monkeypatch, StubBackend(times))
    with pytest.raises(BackendError, match=r"what 'fixed_min' ended with cannot run: \(2,\) cannot run"):
        run_compare(job(), ["fixed_min"])
    assert stub.num_closed == 1


def test_a_default_that_cannot_run_is_an_error_with_its_name(monkeypatch):
    install(monkeypatch, StubBackend({**TIMES, ("h", UNTOUCHED_H): [0.0]}))
    with pytest.raises(BackendError, match="what 'default' ended with cannot run"):
        run_compare(job(), ["fixed_min"])


def test_the_backend_is_closed_when_the_user_interrupts(monkeypatch):
    stub = install(monkeypatch, StubBackend(TIMES, before_call=raising(KeyboardInterrupt(), 4)))
    with pytest.raises(KeyboardInterrupt):
        run_compare(job(), TUNERS)
    assert stub.num_closed == 1


def interrupted(monkeypatch, num_calls: int, tuners: list[str] = TUNERS):
    stub = install(monkeypatch, StubBackend(TIMES, before_call=raising(KeyboardInterrupt(), num_calls)))
    result = run_compare(job(), tuners).to_dict()
    assert stub.num_closed == 1
    assert result["interrupted"] is True
    assert all(row.pop("speedup_interval") is None and row.pop("step_s") is None for row in result["rows"])
    return {row.pop("tuner"): row for row in result["rows"]}


def test_an_interrupted_comparison_keeps_the_searches_that_were_done(monkeypatch):
    unknown = {"makespan_s": None, "speedup_over_default": None, "regret_over_best": None}
    assert interrupted(monkeypatch, 8 + 1) == {"exhaustive": {"num_measurements": 5, **unknown}}
    both = {"exhaustive": {"num_measurements": 5, **unknown}, "fixed_min": {"num_measurements": 1, **unknown}}
    assert interrupted(monkeypatch, 8 + 2 + 5) == both  # in the middle of the first round


def test_a_search_that_is_interrupted_leaves_the_priced_step_of_those_before(monkeypatch):
    original = compare_module.search

    def search_but_the_last(spec, name, *args, **named):
        if name == "fixed_max":
            raise KeyboardInterrupt
        return original(spec, name, *args, **named)

    monkeypatch.setattr(compare_module, "search", search_but_the_last)
    spec = load_job(Path(__file__).parents[2] / "examples" / "phi2_fsdp_a40.toml")
    result = run_compare(spec, ["fixed_min", "fixed_max"])
    assert result.interrupted
    (row,) = result.rows
    assert (row.tuner, row.makespan_s) == ("fixed_min", None)
    assert row.step_s > result.step_s  # one channel and small chunks


def test_an_interrupted_comparison_keeps_the_rounds_that_were_complete(monkeypatch):
    rows = interrupted(monkeypatch, 8 + 2 + 6 + 3)
    # The first round alone: 6 of the default, 8 of exhaustive's result, 20 of fixed_min's.
    assert rows == {
        "exhaustive": {"num_measurements": 5, "makespan_s": 8, "speedup_over_default": 0.75, "regret_over_best": 0},
        "fixed_min": {"num_measurements": 1, "makespan_s": 20, "speedup_over_default": 0.3, "regret_over_best": 1.5},
    }


def test_a_comparison_that_ends_by_itself_does_not_say_that_it_was_interrupted(monkeypatch):
    install(monkeypatch, StubBackend(TIMES))
    assert run_compare(job(), ["fixed_min"]).interrupted is False


def test_backend_and_seed_of_the_call_come_before_the_jobs(monkeypatch):
    stub = install(monkeypatch, StubBackend(TIMES))
    run_compare(job(seed=3), ["fixed_min"])
    assert stub.opened_as == "simulated"
    assert stub.request is not None
    assert stub.request.seed == 3
    run_compare(job(seed=3), ["fixed_min"], backend="gloo", seed=0)
    assert stub.opened_as == "gloo"
    assert stub.request.seed == 0


def test_the_seed_reaches_every_tuner_and_every_study(monkeypatch):
    install(monkeypatch, StubBackend(TIMES))
    tuner_seeds = spy(monkeypatch, "lagom_overlap.verbs.compare.make_tuner", "seed")
    study_seeds = spy(monkeypatch, "lagom_overlap.verbs.compare.Study", "seed")
    run_compare(job(seed=9), TUNERS)
    assert tuner_seeds == study_seeds == [9, 9]


def test_a_tuner_that_does_not_exist_is_refused_before_the_backend_is_opened(monkeypatch):
    stub = install(monkeypatch, StubBackend(TIMES))
    with pytest.raises(UnknownNameError, match=r"fixed_mim.*did you mean 'fixed_min'"):
        run_compare(job(), ["exhaustive", "fixed_mim"])
    assert stub.opened_as is None


def test_each_stage_is_named_before_it_runs(monkeypatch):
    stub = install(monkeypatch, StubBackend(TIMES))
    notes: list[tuple[str, int]] = []
    run_compare(job(), TUNERS, note=lambda text: notes.append((text, len(stub.calls))))
    assert notes == [("search: exhaustive", 0), ("search: fixed_min", 8), ("measuring the results side by side", 10)]


def test_no_tuner_or_one_named_twice_is_refused(monkeypatch):
    install(monkeypatch, StubBackend(TIMES))
    with pytest.raises(JobError, match=r"no tuner to compare; allowed: .*lagom"):
        run_compare(job(), [])
    with pytest.raises(JobError, match="a tuner is named twice: lagom, default, lagom"):
        run_compare(job(), ["lagom", "default", "lagom"])


def test_a_search_ends_without_a_verdict(monkeypatch):
    stub = install(monkeypatch, StubBackend(SEARCHED))
    spec = job()
    problems = tuple(stub.problem(group) for group in Job(spec).groups)
    study = search(spec, "exhaustive", problems, stub, 0)
    assert study.verdict is None
    assert study.recommended == {"g": assignment_of(TUNED_G), "h": assignment_of(TUNED_H)}
    assert stub.settings_of("g") == [UNTOUCHED_G, (2, 2), (2, 4), (4, 2), (4, 4)]
    assert stub.settings_of("h") == [UNTOUCHED_H, (2,), (4,)]


def arms_of(*settings: tuple[Setting, Setting]) -> dict[str, dict[str, tuple]]:
    return {str(g): {"g": assignment_of(g), "h": assignment_of(h)} for g, h in settings}


def test_a_round_sums_every_time_over_the_groups_and_their_counts():
    stub = StubBackend({("g", (2, 2)): [8, 16], ("h", (2,)): [16, 32]})
    problems = tuple(stub.problem(group) for group in Job(job()).groups)
    rounds = list(measured_rounds(stub, problems, arms_of(((2, 2), (2,))), 2, seed=0))
    # g: Y 4, x 2 + 1; h: Y 8, x 4
    first = IterationTimes(makespan_s=2 * 8 + 3 * 16, comp_s=2 * 4 + 3 * 8, comm_s=2 * (2 + 1) + 3 * 4)
    second = IterationTimes(2 * first.makespan_s, 2 * first.comp_s, 2 * first.comm_s)
    assert rounds == [{"(2, 2)": first}, {"(2, 2)": second}]


def test_every_arm_runs_once_in_each_round_in_an_order_that_the_seed_shuffles():
    settings: list[tuple[Setting, Setting]] = [((n, n), (n,)) for n in (1, 2, 3, 4)]
    times: Times = {("g", g): [1.0] for g, _ in settings} | {("h", h): [1.0] for _, h in settings}

    def rounds(seed: int) -> list[list[Setting]]:
        stub = StubBackend(times)
        problems = tuple(stub.problem(group) for group in Job(job()).groups)
        list(measured_rounds(stub, problems, arms_of(*settings), 6, seed))
        ran = stub.settings_of("g")
        return [ran[start : start + 4] for start in range(0, 24, 4)]

    assert all(sorted(order) == [(n, n) for n in (1, 2, 3, 4)] for order in rounds(0))
    assert len({tuple(order) for order in rounds(0)}) > 1
    assert rounds(0) == rounds(0)
    assert rounds(0) != rounds(1)


def test_a_warm_start_is_for_the_tuners_that_take_one(monkeypatch, tmp_path):
    (tmp_path / "measurements.jsonl").touch()
    install(monkeypatch, StubBackend(TIMES))
    given: dict[str, Any] = {}
    monkeypatch.setattr("lagom_overlap.verbs.compare.warm_start_of", lambda *_, **__: WarmStart(source="elsewhere"))
    original = compare_module.make_tuner

    def make(name, *args, **named):
        given[name] = named["warm"]
        return original(name, *args, **named | {"warm": None})

    monkeypatch.setattr("lagom_overlap.verbs.compare.make_tuner", make)
    notes = run_compare(job(), ["fixed_min", "ours"], warm_start=str(tmp_path)).notes
    assert given == {"fixed_min": None, "ours": WarmStart(source="elsewhere")}
    assert "The search of ours began with elsewhere; every other began cold." in notes
    with pytest.raises(JobError, match="tuner 'fixed_min' takes no warm start; allowed with: ours"):
        run_compare(job(), ["fixed_min"], warm_start=str(tmp_path))
    with pytest.raises(JobError, match="warm start 'nowhere' is no run folder"):
        run_compare(job(), ["ours"], warm_start="nowhere")


def test_the_jobs_own_warm_start_is_not_for_comparisons_and_that_is_said(monkeypatch):
    install(monkeypatch, StubBackend(TIMES))
    assert COLD in run_compare(job(warm_start="before"), ["fixed_min"]).notes
    assert COLD not in run_compare(job(), ["fixed_min"]).notes
