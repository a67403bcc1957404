"""Several tuners on one job: who asks when, and what the verdict makes of what each ends with."""

import pytest

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, ConfigSpace, Subspace
from lagom_overlap.tuners.base import Trial
from lagom_overlap.tuners.exhaustive import Exhaustive
from lagom_overlap.tuners.fixed import FixedMax, FixedMin
from lagom_overlap.tuners.in_turns import InTurns
from lagom_overlap.tuners.problem import GroupProblem, Measurement
from lagom_overlap.tuners.study import Study, StudyPhase
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

CHANNELS = (1, 2, 4, 8)
SPACE = ConfigSpace((Subspace(num_channels=CHANNELS, chunk_bytes=(1 << 20,)),))
COMM = CommOp(name="c", collective=Collective(CollectiveKind.ALL_REDUCE, 2**20, 2))
PROBLEM = GroupProblem(
    group=OverlapGroup(name="g", computations=(CompOp(name="mm", work=Gemm(8, 8, 8)),), comms=(COMM,)),
    spaces=(SPACE,),
    default=(CommConfig(),),
)
TAKES_S = {None: 1.0, 1: 2.0, 2: 1.1, 4: 0.8, 8: 1.004}


def run(trial_or_step: object) -> dict[str, Measurement]:
    ((config,),) = trial_or_step.assignments.values()
    took_s = TAKES_S[config.num_channels]
    return {"g": Measurement(makespan_s=took_s, comp_s=took_s / 2, comm_s=(took_s,))}


def in_turns(most: int = 10) -> InTurns:
    problems = (PROBLEM,)
    tuners = {"best": Exhaustive(problems), "min": FixedMin(problems), "max": FixedMax(problems)}
    return InTurns(problems, tuners, most)


def test_each_searches_to_its_end_or_to_its_share_and_then_the_next_one() -> None:
    for most, asked in ((10, ["best"] * 5 + ["min", "max"]), (2, ["best"] * 2 + ["min", "max"])):
        tuner, found = in_turns(most), []
        while isinstance(trial := tuner.ask(), Trial):
            found.append(tuner.searching)
            assert trial.number == len(found) - 1
            assert trial.reasons["g"].startswith(f"{tuner.searching}: ")
            tuner.tell(trial, run(trial))
        assert found == asked
        assert tuner.recommend() == tuner.results()["best"]
    with pytest.raises(ValueError, match="needs two tuners"):
        InTurns((PROBLEM,), {"min": FixedMin((PROBLEM,))}, 3)


def study_of(tuner: InTurns) -> Study:
    return Study((PROBLEM,), tuner, num_pairs=3)


def test_the_verdict_compares_each_with_the_default_and_adopts_the_first_alone() -> None:
    study = study_of(in_turns())
    most = study.num_verdict_steps
    while (step := study.next()) is not None:
        study.report(step, run(step))
    assert study.phase is StudyPhase.DONE
    best, least, largest = study.contenders
    assert study.chosen["g"][0].num_channels == 4
    for each, took_s, decision in ((best, 0.8, "faster"), (least, 2.0, "slower"), (largest, 1.004, "no difference")):
        assert each.judgement is not None
        assert each.judgement.ratio == pytest.approx(1 / took_s)
        assert each.judgement.decision == decision
    verdict = [entry for entry in study.entries if entry.step.arm is not None]
    assert len(verdict) <= most
    again = study_of(in_turns())
    again.replay(study.entries)
    assert again.contenders == study.contenders


def test_what_ends_alike_runs_once_and_who_has_not_begun_is_not_compared() -> None:
    problems = (PROBLEM,)
    study = study_of(
        InTurns(problems, {"one": FixedMax(problems), "two": FixedMax(problems), "min": FixedMin(problems)}, 5)
    )
    for _ in range(2):
        step = study.next()
        assert step is not None
        study.report(step, run(step))
    study.stop_search()
    while (step := study.next()) is not None:
        study.report(step, run(step))
    assert {entry.step.arm for entry in study.entries} == {None, "default against itself", "default", "tuned"}
    one, two, least = study.contenders
    assert one.judgement == two.judgement
    assert (one.num_measurements, two.num_measurements, least.num_measurements) == (1, 1, 0)
    assert least.judgement is None
    assert least.assignments == {"g": PROBLEM.default}
