"""The JSON objects against figures worked out by hand."""

from stub_backend import Setting, StubBackend, assignment_of, job

from lagom_overlap.backends.base import Failure, Measurement, Outcome
from lagom_overlap.collective import Algorithm, CommConfig, Protocol, Transport
from lagom_overlap.job.build import groups_of
from lagom_overlap.job.result import (
    ConfigJson,
    Ratio,
    Times,
    config_json,
    configs_json,
    times_of,
    times_of_assignment,
    verdict_json,
)
from lagom_overlap.tune.journal import Entry, Step, StepKind
from lagom_overlap.tune.verdict import NO_PAIRS, PairedRatio, Verdict

PROBLEMS = tuple(StubBackend({}).problem(group) for group in groups_of(job()))
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
    assert times_of_assignment(PROBLEMS, entries, "tuned", assignments) == Times(
        makespan_s=13, comp_s=13, comm_s={"ag": 2, "rs": 2, "ar": 3}
    )
    assert times_of_assignment(PROBLEMS, entries, "default", assignments) == Times(
        makespan_s=250, comp_s=250, comm_s={"ag": 50, "rs": 50, "ar": 50}
    )


def test_without_a_verdict_the_searchs_runs_of_that_very_setting_count_group_by_group():
    entries = [
        entry(0, {G: (2, 4), H: (2,)}, {G: run(3, 1, 1, 1), H: run(70, 70, 70)}),
        entry(1, {G: (4, 4), H: (4,)}, {G: run(80, 80, 80, 80), H: run(5, 2, 1)}),
        entry(2, {G: (2, 4)}, {G: run(5, 3, 3, 3)}),
    ]
    found = times_of_assignment(PROBLEMS, entries, "tuned", {G: assignment_of((2, 4)), H: assignment_of((4,))})
    # Medians 4 and 5: 2 x 4 + 3 x 5
    assert found == Times(makespan_s=23, comp_s=2 * 2 + 3 * 2, comm_s={"ag": 2, "rs": 2, "ar": 1})
    never = {G: assignment_of((2, 4)), H: assignment_of((None,))}
    assert times_of_assignment(PROBLEMS, entries, "tuned", never) is None


def test_a_configuration_is_printed_knob_by_knob():
    config = CommConfig(
        algorithm=Algorithm.RING,
        protocol=Protocol.LL128,
        transport=Transport.SHM,
        num_channels=3,
        num_threads=128,
        chunk_bytes=7,
    )
    assert config_json(config) == ConfigJson(
        algorithm="ring", protocol="ll128", transport="shm", num_channels=3, num_threads=128, chunk_bytes=7
    )


def test_configurations_stand_under_their_group_and_collective_in_order():
    printed = configs_json(PROBLEMS, {G: assignment_of((2, 4)), H: assignment_of((None,))})
    channels = {group: {name: config.num_channels for name, config in row.items()} for group, row in printed.items()}
    assert channels == {"g": {"ag": 2, "rs": 4}, "h": {"ar": None}}


def ratio(median_ratio: float) -> PairedRatio:
    return PairedRatio(
        num_pairs=5, median_ratio=median_ratio, q25=median_ratio - 0.5, q75=median_ratio + 0.25, num_wins=4
    )


def verdict(**changes: object) -> Verdict:
    fields: dict[str, object] = {
        "over_default": ratio(2),
        "over_baselines": {"engine_default": ratio(3), "fixed_min": ratio(4), "fixed_max": ratio(5)},
        "best_fixed": "fixed_max",
        "adopted": True,
        "makespans_s": {},
    }
    return Verdict(**(fields | changes))  # type: ignore[arg-type]


def test_a_verdict_gives_each_ratio_under_its_own_name():
    printed = verdict_json(verdict())
    assert printed is not None
    assert (printed.pairs, printed.wins) == (5, 4)
    assert (printed.median_ratio, printed.q25, printed.q75) == (2, 1.5, 2.25)
    assert printed.over_engine_default == Ratio(median_ratio=3, q25=2.5, q75=3.25)
    assert printed.over_best_fixed == Ratio(median_ratio=5, q25=4.5, q75=5.25)
    assert printed.best_fixed == "fixed_max"
    assert printed.adopted is True


def test_a_verdict_says_nothing_about_contenders_that_were_not_there():
    printed = verdict_json(verdict(over_baselines={"fixed_min": ratio(4)}, best_fixed=None, adopted=False))
    assert printed is not None
    assert printed.over_engine_default is None
    assert printed.over_best_fixed is None
    assert printed.best_fixed is None
    assert printed.adopted is False
    assert verdict_json(None) is None


def test_a_tuned_assignment_that_failed_has_no_pairs():
    printed = verdict_json(verdict(over_default=NO_PAIRS, over_baselines={}, best_fixed=None, adopted=False))
    assert printed is not None
    assert (printed.pairs, printed.wins, printed.median_ratio) == (0, 0, 0)
