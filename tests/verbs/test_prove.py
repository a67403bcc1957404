"""`lagom run --prove` by restarts: the order of the runs, the decisions, what cannot be proven, signals."""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

import pytest

import lagom_overlap
from lagom_overlap.cli import main
from lagom_overlap.collective import ConfigTable
from lagom_overlap.errors import BundleError, JobError
from lagom_overlap.export.run_variables import RunMode
from lagom_overlap.nccl_plugin.table_writer import encode_table, write_table
from lagom_overlap.report.proof import render_proof
from lagom_overlap.results.proof import ProofDecision, ProofWay, next_line
from lagom_overlap.results.step_times import RunSteps, write_step_times
from lagom_overlap.tuners.sequential import ALPHA
from lagom_overlap.verbs.given import given
from lagom_overlap.verbs.prove import FEW_ALPHA, error_rate, prove_by_restarts
from lagom_overlap.verbs.run import LaunchRequest, PreparedLaunch
from lagom_overlap.verbs.saved_runs import report_of, run_runs
from lagom_overlap.verbs.show import run_show


@pytest.fixture
def asked(tmp_path: Path) -> LaunchRequest:
    (tmp_path / "try.env").write_text("TRIED=1\n")
    command = (sys.executable, "train.py")
    return LaunchRequest(command=command, mode=RunMode.PROVE, config=tmp_path / "try.env", out=tmp_path / "proof")


def runner(
    ratio: float, sigma: float = 0.01, steps: int = 20, code: Callable[[bool, int], int] = lambda *_: 0
) -> tuple[Callable[[PreparedLaunch], int], list[bool]]:
    """A job whose configured steps are faster by `ratio`, with noise between runs; and which runs were configured."""
    random, numbers, order = Random(0), count(), []

    def run(launch: PreparedLaunch) -> int:
        is_configured = launch.environment.get("TRIED") == "1"
        order.append(is_configured)
        step_s = random.lognormvariate(0.0, sigma) / (ratio if is_configured else 1.0)
        if steps:
            # The first three steps warm up: they must not count.
            times = RunSteps(num_steps=steps, num_settings=0, steps_s=(9.0, 9.0, 9.0, *[step_s] * (steps - 4)))
            write_step_times(launch.folder, times)
        return code(is_configured, next(numbers))

    return run, order


def prove(asked: LaunchRequest, run: Callable[[PreparedLaunch], int], most_pairs: int = 6):
    said: list[str] = []
    result, folder = prove_by_restarts(asked, most_pairs, {"PATH": os.environ["PATH"]}, say=said.append, run=run)
    saved = json.loads((folder / "proof.json").read_text())
    assert (saved["decision"], saved["way"]) == (result.decision, "restarts")
    assert result.found in (folder / "report.html").read_text()
    assert lagom_overlap.load(folder) == result
    return result, said


def test_at_most_six_pairs_of_restarts_prove_a_clear_gain_at_five_percent(asked: LaunchRequest) -> None:
    run, order = runner(1.1)
    result, said = prove(asked, run)
    assert (result.decision, result.judgement.num_pairs) == (ProofDecision.ADOPT, 5)
    assert (result.judgement.alpha, "error rate 5 %" in result.reason) == (FEW_ALPHA, True)
    assert result.judgement.ratio == pytest.approx(1.1, rel=0.02)
    pairs = list(zip(order[::2], order[1::2], strict=True))
    assert {*pairs} == {(True, False), (False, True)}, "a coin draws who comes first"
    assert result.next_line.startswith("lagom run --config ")
    assert said[0].startswith("pair 1 of at most 6: ")


@pytest.mark.parametrize(("ratio", "decision"), [(0.9, ProofDecision.REJECT), (1.0, ProofDecision.NO_DIFFERENCE)])
def test_a_loss_is_rejected_and_a_null_is_bounded(asked: LaunchRequest, ratio: float, decision: ProofDecision) -> None:
    result, _ = prove(asked, runner(ratio, sigma=0.002)[0], most_pairs=30)
    assert (result.decision, result.judgement.alpha) == (decision, ALPHA)
    if decision is ProofDecision.NO_DIFFERENCE:
        assert 0 < result.judgement.largest_unseen < 0.05


def test_nulls_are_adopted_no_more_often_than_the_error_rate_says(asked: LaunchRequest, tmp_path: Path) -> None:
    # Of 200 nulls at 5 % ten are expected at most; more than 20 has a chance below 1 in 1000.
    from lagom_overlap.tuners.sequential import proven_pairs

    random, num_adopted = Random(1), 0
    for _ in range(200):
        times = [[random.lognormvariate(0.0, 0.03) for _ in range(6)] for _ in range(2)]
        num_adopted += any(proven_pairs(times[0][:n], times[1][:n], 6, alpha=FEW_ALPHA).is_faster for n in range(2, 7))
    assert num_adopted <= 20


def test_the_error_rate_is_one_that_the_pairs_can_reach() -> None:
    assert [error_rate(num) for num in (6, 7, 8, 25)] == [0.05, 0.05, 0.01, 0.01]


def test_what_breaks_the_job_is_rejected_once_the_job_ran_without_it(asked: LaunchRequest) -> None:
    run, order = runner(1.0, code=lambda is_configured, _: int(is_configured))
    result, _ = prove(asked, run)
    assert result.decision is ProofDecision.REJECT
    assert result.reason.startswith("the job ended with exit code 1 with it (files in ")
    assert len(order) == 2


@pytest.mark.parametrize(("is_configured", "words"), [(True, "1 with it"), (False, "1 as it is")])
def test_a_run_that_fails_after_good_pairs_costs_no_pair_and_refutes_nothing(
    asked: LaunchRequest, words: str, *, is_configured: bool
) -> None:
    run, _ = runner(1.05, code=lambda configured, number: int(number > 3 and configured is is_configured))
    result, _ = prove(asked, run)
    assert (result.decision, len(result.default_s)) == (ProofDecision.UNDECIDED, 2)
    assert f"exit code {words}" in result.reason
    assert result.reason.endswith(", after 2 whole pairs")


def test_a_run_that_cannot_be_prepared_after_good_pairs_costs_no_pair(asked: LaunchRequest) -> None:
    inner, order = runner(1.05)

    def run(launch: PreparedLaunch) -> int:
        if len(order) == 3:
            assert asked.config is not None
            asked.config.unlink()
        return inner(launch)

    result, _ = prove(asked, run)
    assert (result.decision, len(result.default_s)) == (ProofDecision.UNDECIDED, 2)
    assert "try.env' does not exist" in result.reason


def test_what_overrides_a_run_is_said_once(asked: LaunchRequest) -> None:
    said: list[str] = []
    environment = {"PATH": os.environ["PATH"], "NCCL_ALGO": "Ring"}
    prove_by_restarts(asked, 3, environment, say=said.append, run=runner(1.0)[0])
    assert [line.startswith("NCCL_ALGO=Ring: ") for line in said].count(True) == 1


def test_after_the_most_pairs_there_are_only_more_steps() -> None:
    flags = {"flags": "--restarts 50"}
    open_line = next_line(ProofDecision.UNDECIDED, "x.env", "train", **flags, is_longest=True)
    assert open_line == "lagom run --prove x.env --restarts 50 -- train    # with more steps"
    assert next_line(ProofDecision.UNDECIDED, "x.env", "train", **flags).endswith("--restarts 50 -- train")
    null_line = next_line(ProofDecision.NO_DIFFERENCE, "x.env", "train", **flags, is_longest=True)
    assert null_line == "train    # as it is, without x.env"


def test_a_proof_is_a_run_that_other_verbs_know(asked: LaunchRequest) -> None:
    result, _ = prove(asked, runner(1.1)[0])
    folder = asked.out
    assert folder is not None
    assert report_of(folder) == folder / "report.html"
    assert [listed.report for listed in run_runs(folder.parent).runs] == [folder / "report.html"]
    shown = run_show(folder)
    assert shown.what == f"a proof of {asked.config}"
    assert shown.said[:2] == ("decision: adopt", f"why: {result.reason}")
    assert shown.next == f"Next: {result.next_line}"
    with pytest.raises(JobError, match=r"is a proof, which sets nothing; give what it proves: .*try.env \(adopt\)"):
        given(folder)
    (folder / "proof.json").write_text("{")
    with pytest.raises(BundleError, match=r"proof.json' is damaged"):
        run_show(folder)


def test_a_page_says_in_which_way_it_was_proven(asked: LaunchRequest) -> None:
    result, _ = prove(asked, runner(1.0)[0], most_pairs=1)
    assert "Proof by restarts of the job" in render_proof(result)
    assert "Proof in the job itself" in render_proof(replace(result, way=ProofWay.IN_JOB, steps_per_block=4))


def test_a_job_that_fails_by_itself_proves_nothing(asked: LaunchRequest) -> None:
    run, _ = runner(1.0, code=lambda is_configured, _: 0 if is_configured else 3)
    with pytest.raises(JobError, match="exit code 3 as it is"):
        prove(asked, run)


def test_what_cannot_be_set_is_refused_before_there_is_a_folder(asked: LaunchRequest) -> None:
    (asked.config or Path()).write_text("no assignment\n")
    with pytest.raises(JobError, match="is not NAME=value"):
        prove(asked, lambda launch: pytest.fail("it was started"))
    assert not (asked.out or Path()).exists()


@pytest.mark.parametrize(("steps", "words"), [(0, "no step of a run was timed"), (8, "a run has 8 steps")])
def test_a_run_without_enough_steps_proves_nothing(asked: LaunchRequest, steps: int, words: str) -> None:
    with pytest.raises(JobError, match=words):
        prove(asked, runner(1.0, steps=steps)[0])


def test_a_signal_ends_the_proof_with_what_the_pairs_show(asked: LaunchRequest) -> None:
    inner, order = runner(1.1)

    def run(launch: PreparedLaunch) -> int:
        if len(order) == 5:
            raise KeyboardInterrupt
        return inner(launch)

    result, _ = prove(asked, run)
    assert (result.decision, result.reason) == (ProofDecision.UNDECIDED, "ended by a signal after 2 whole pairs")
    assert (len(result.default_s), len(result.configured_s)) == (2, 2)
    assert "--restarts 6 --" in result.next_line, "cut off, not too short"


@pytest.mark.parametrize("is_table", [True, False])
def test_a_table_of_the_environment_is_in_no_arm_that_another_one_replaces(
    asked: LaunchRequest, tmp_path: Path, *, is_table: bool
) -> None:
    if is_table:
        write_table(tmp_path / "lagom_table.bin", encode_table(ConfigTable({}), generation=1, communicators=[]).data)
        asked = replace(asked, config=tmp_path / "lagom_table.bin")
    seen, said = {}, []

    def run(launch: PreparedLaunch) -> int:
        seen[launch.environment["LAGOM_RUN_MODE"]] = launch.environment["LAGOM_TABLE"]
        write_step_times(launch.folder, RunSteps(num_steps=20, num_settings=0, steps_s=(1.0,) * 19))
        return 0

    environment = {"PATH": os.environ["PATH"], "LAGOM_TABLE": "/deployed/table.bin"}
    prove_by_restarts(asked, 1, environment, say=said.append, run=run)
    if is_table:
        assert seen.pop("fixed").endswith("-configured/lagom_table.bin")
    assert seen == {"planned": "" if is_table else "/deployed/table.bin"}
    words = "is left out: the default arm runs untouched" if is_table else "decides in both arms"
    assert said[0] == f"LAGOM_TABLE of the environment {words}"


def test_tasks_of_a_launcher_are_told_to_prove_from_one_place(asked: LaunchRequest) -> None:
    with pytest.raises(JobError, match="from one place"):
        prove_by_restarts(asked, 6, {"PATH": os.environ["PATH"], "SLURM_STEP_NUM_TASKS": "2"}, say=lambda _: None)


def test_a_batch_script_is_one_place_whatever_number_of_tasks_it_has(asked: LaunchRequest) -> None:
    environment = {"PATH": os.environ["PATH"], "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}
    result, _ = prove_by_restarts(asked, 1, environment, say=lambda _: None, run=runner(1.0)[0])
    assert len(result.default_s) == 1


def test_the_command_line_runs_real_processes_and_ends_with_three_lines(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "try.env").write_text("TRIED=1\n")
    # Writes what the session of a rank writes, without a framework.
    job = (
        "import os, pathlib\n"
        "from lagom_overlap.results.step_times import RunSteps, write_step_times\n"
        "step_s = 0.5 if 'TRIED' in os.environ else 1.0\n"
        "times = RunSteps(num_steps=12, num_settings=0, steps_s=(step_s,) * 11)\n"
        "write_step_times(pathlib.Path(os.environ['LAGOM_RUN_FOLDER']), times)\n"
    )
    (tmp_path / "job.py").write_text(job)
    assert main(["run", "--prove", "try.env", "--out", "proof", "--", sys.executable, "job.py"]) == 0
    said = capfd.readouterr().err.splitlines()
    assert said[-4:-1] == [
        "lagom: result: adopt: try.env",
        "lagom: why: proven faster in 3 pairs: 2.000x (2.000 to 2.000; error rate 5 %)",
        f"lagom: next: lagom run --config try.env -- {sys.executable} job.py",
    ]
    assert said[-1] == "lagom run: files in proof"


def test_a_proof_that_a_signal_ends_has_the_signals_exit_code(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "try.env").write_text("TRIED=1\n")
    job = f"import os, signal; os.kill({os.getpid()}, signal.SIGTERM); signal.pause()"
    command = ["run", "--prove", "try.env", "--out", "proof", "--", sys.executable, "-c", job]
    assert main(command) == 128 + signal.SIGTERM
    assert "ended by a signal after 0 whole pairs" in capfd.readouterr().err
    assert json.loads((tmp_path / "proof" / "proof.json").read_text())["decision"] == "undecided"
