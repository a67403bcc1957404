"""The loop between study and backend: what is kept, what is counted, what the clock ends."""

from collections.abc import Mapping

import pytest
from stub_backend import (
    JUDGED,
    SEARCHED,
    TUNED_G,
    TUNED_H,
    UNTOUCHED_G,
    UNTOUCHED_H,
    StubBackend,
    in_turn,
    install,
    job,
    raising,
    setting_of,
)

from lagom_overlap.errors import BackendError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.tuners.exhaustive import Exhaustive
from lagom_overlap.tuners.journal import Entry, StepKind
from lagom_overlap.tuners.problem import Failure, Measurement
from lagom_overlap.tuners.study import Study, StudyPhase
from lagom_overlap.verbs.measure import Run, RunProgress, iteration_makespan_s


def run_of(
    monkeypatch: pytest.MonkeyPatch, stub: StubBackend, *, max_seconds: float = 1000, max_measurements: int = 40
) -> Run:
    install(monkeypatch, stub)
    problems = tuple(stub.problem(group) for group in Job(job()).groups)
    study = Study(problems, Exhaustive(problems), num_pairs=3, max_measurements=max_measurements)
    return Run(
        study=study,
        backend=stub,
        problems=problems,
        max_seconds=max_seconds,
        max_measurements=max_measurements,
    )


def full_stub(**changes: object) -> StubBackend:
    return StubBackend(in_turn(SEARCHED, JUDGED), **changes)  # type: ignore[arg-type]


def recommended(run: Run) -> Mapping[str, tuple[int | None, ...]]:
    return {name: setting_of(assignment) for name, assignment in run.study.recommended.items()}


def test_every_step_is_kept_and_then_shown(monkeypatch):
    run = run_of(monkeypatch, full_stub())
    log: list[Entry | RunProgress] = []
    run.drive(log.append, log.append)
    kept, shown = log[::2], log[1::2]
    assert tuple(kept) == run.study.entries
    assert len(kept) == 5 + 2 + 3 * 5  # a pair of the default against itself comes before the rounds
    assert all(isinstance(progress, RunProgress) for progress in shown)
    assert run.study.phase is StudyPhase.DONE
    assert run.interrupted is False


def test_progress_counts_the_steps_of_each_phase_and_keeps_the_best_iteration_of_the_search(monkeypatch):
    shown: list[RunProgress] = []
    run_of(monkeypatch, full_stub()).drive(shown.append)
    searched, judged = shown[:5], shown[5:]
    assert [(p.phase, p.num_done, p.num_planned) for p in searched] == [
        (StepKind.SEARCH, number, 40) for number in range(1, 6)
    ]
    # At most three pairs of the default, one of them where times repeat to the last bit; then the default, three
    # baselines and the tuned one, three times.
    assert [(p.phase, p.num_done, p.num_planned) for p in judged] == [
        (StepKind.VERDICT, number, 6 + 15) for number in range(1, 2 + 15 + 1)
    ]
    # 2 x 50 + 3 x 40, then 2 x 5 + 3 x 6, then 2 x 0.5 + 3 x 0.5; then only g is measured, and the verdict is no search
    assert [p.best_s for p in searched] == [220, 28, 2.5, 2.5, 2.5]
    assert {p.best_s for p in judged} == {2.5}


def test_a_slower_step_or_a_failed_one_does_not_replace_the_best(monkeypatch):
    times = {**in_turn(SEARCHED, JUDGED), ("g", (2, 2)): [60.0], ("h", TUNED_H): [0.0]}
    shown: list[RunProgress] = []
    run_of(monkeypatch, StubBackend(times)).drive(shown.append)
    assert [p.best_s for p in shown[:3]] == [220, 2 * 60 + 3 * 6, 138]


def test_a_faster_run_of_the_verdict_is_no_find_of_the_search(monkeypatch):
    times = {**in_turn(SEARCHED, JUDGED), ("g", TUNED_G): [0.5, 0.25], ("h", TUNED_H): [0.5, 0.25]}
    shown: list[RunProgress] = []
    run_of(monkeypatch, StubBackend(times)).drive(shown.append)
    assert {p.best_s for p in shown if p.phase is StepKind.VERDICT} == {2.5}


def test_no_best_is_shown_before_a_whole_iteration_ran(monkeypatch):
    times = {**in_turn(SEARCHED, JUDGED), ("g", UNTOUCHED_G): [0.0, 1.5, 2, 4]}
    shown: list[RunProgress] = []
    run_of(monkeypatch, StubBackend(times)).drive(shown.append)
    assert [p.best_s for p in shown[:2]] == [None, 28]


@pytest.mark.parametrize(("max_seconds", "num_steps"), [(1, 1), (3, 2), (5, 3), (6.5, 4), (1000, 5)])
def test_the_seconds_end_the_search_and_not_the_verdict(monkeypatch, max_seconds, num_steps):
    # The first three steps take two seconds each, one a group; then h is finished and a step takes one.
    run = run_of(monkeypatch, full_stub(), max_seconds=max_seconds)
    kept: list[Entry] = []
    run.drive(keep=kept.append)
    kinds = [entry.step.kind for entry in kept]
    assert kinds == [StepKind.SEARCH] * num_steps + [StepKind.VERDICT] * (2 + 15)
    assert run.study.num_measurements == num_steps
    assert run.study.verdict is not None


def test_a_search_cut_short_stands_by_the_best_so_far(monkeypatch):
    run = run_of(monkeypatch, StubBackend({**SEARCHED, **JUDGED, ("g", (2, 2)): [5], ("h", (2,)): [6]}), max_seconds=3)
    run.drive()
    assert recommended(run) == {"g": UNTOUCHED_G, "h": UNTOUCHED_H}
    run = run_of(monkeypatch, full_stub(), max_seconds=5)
    run.drive()
    assert recommended(run) == {"g": TUNED_G, "h": TUNED_H}


def test_the_number_of_measurements_ends_the_search(monkeypatch):
    run = run_of(monkeypatch, full_stub(), max_measurements=4)
    run.drive()
    assert run.study.num_measurements == 4
    assert run.study.verdict is not None


def test_ctrl_c_ends_the_run_and_keeps_the_whole_steps(monkeypatch):
    run = run_of(monkeypatch, full_stub(before_call=raising(KeyboardInterrupt(), 5)))
    kept: list[Entry] = []
    run.drive(keep=kept.append)
    assert run.interrupted is True
    assert tuple(kept) == run.study.entries
    assert [sorted(entry.outcomes) for entry in kept] == [["g", "h"], ["g", "h"]]
    assert run.study.verdict is None


def test_a_machine_that_fails_ends_the_run_after_the_whole_steps_were_kept(monkeypatch):
    run = run_of(monkeypatch, full_stub(before_call=raising(BackendError("rank 1 is gone"), 5)))
    kept: list[Entry] = []
    with pytest.raises(BackendError, match="rank 1 is gone"):
        run.drive(keep=kept.append)
    assert len(kept) == 2
    assert run.interrupted is False


def test_an_iteration_counts_each_group_and_needs_them_all():
    problems = tuple(StubBackend({}).problem(group) for group in Job(job()).groups)
    g = Measurement(makespan_s=5, comp_s=1, comm_s=(1, 1))
    h = Measurement(makespan_s=7, comp_s=1, comm_s=(1,))
    assert iteration_makespan_s(problems, {"g": g, "h": h}) == 2 * 5 + 3 * 7
    assert iteration_makespan_s(problems, {"g": g}) is None
    assert iteration_makespan_s(problems, {"g": g, "h": Failure("no")}) is None
