from statistics import median

import pytest
from toy_tuning import changed

from lagom_overlap.report.tune.probes import histories
from lagom_overlap.tuners.journal import StepKind


def outcomes_of(report, arm):
    return [e.outcomes["block/0"] for e in report.search.entries if e.step.arm == arm]


def test_times_before_and_after_are_the_medians_of_the_rounds(report):
    history = histories(report)[0]
    for arm, found in (("default", history.default), ("tuned", history.tuned)):
        runs = outcomes_of(report, arm)
        assert found.makespan_s == median(run.makespan_s for run in runs)
        assert found.comm_s[1] == median(run.comm_s[1] for run in runs)


def test_without_rounds_they_are_the_searchs_probes_of_that_assignment(make_report):
    report = make_report(with_verdict=False)
    history = histories(report)[0]
    assert history.default.makespan_s == report.search.entries[0].outcomes["block/0"].makespan_s
    best = min(e.outcomes["block/0"].makespan_s for e in report.search.entries)
    assert history.tuned.makespan_s == history.best[1].makespan_s == best


def test_probes_are_the_searchs_alone(report):
    history = histories(report)[0]
    numbers = [e.step.number for e in report.search.entries if e.step.kind is StepKind.SEARCH]
    assert [probe.number for probe in history.probes] == numbers


def test_a_tuned_default_without_a_probe_of_its_own_has_the_defaults_times(make_report):
    report = make_report(with_verdict=False)
    same = changed(report, recommended={p.group.name: p.default for p in report.search.problems})
    history = histories(same)[0]
    assert history.tuned == history.default


def test_a_recommendation_of_the_wrong_length_is_refused(report):
    with pytest.raises(ValueError, match="1 recommended configurations for 2"):
        changed(report, recommended={"block/0": report.search.problems[0].default[:1]})
