"""The three lines at the end of a run, and the words of a proof."""

import json
from pathlib import Path

import pytest

from lagom_overlap.export.run_variables import COMMAND_VARIABLE
from lagom_overlap.online.conclusions import Stand, command_text, of_proof, of_tuning
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.check import Arm, Check
from lagom_overlap.online.ranks.messages import SwitchState
from lagom_overlap.report.proof import render_proof, write_proof
from lagom_overlap.results.conclusion import Conclusion
from lagom_overlap.results.proof import ProofDecision
from lagom_overlap.tuners.problem import MAX_PAIRS

OPTIONS = OnlineOptions(searches=False, watch_steps=0)


def stand(state: SwitchState, **more: object) -> Stand:
    given = {"reason": "so", "num_settings": 0, "num_steps": 30, "num_steps_left": 0, "has_model": True}
    return Stand(**{"state": state, "is_on_gloo": True, **given, **more})


def test_a_search_that_the_job_cut_off_is_begun_again_as_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGOM_RUN_TUNER", "lagom")
    monkeypatch.setenv("LAGOM_RUN_ADAPTERS", "ddp,calls")
    ending = of_tuning(stand(SwitchState.SEARCH), Path("a"), "python t.py")
    assert ending.next_line.startswith("lagom run --online --tuner lagom --adapters ddp,calls -- python t.py")


@pytest.mark.parametrize(
    ("at", "found", "next_line"),
    [
        (stand(SwitchState.WATCH, num_settings=2), "2 call sites are set", "lagom run --prove 'a b' -- python t.py"),
        (stand(SwitchState.DONE), "nothing is set", "python t.py    # as it is"),
        (stand(SwitchState.OFF), "everything runs untouched", "lagom run --observe -- python t.py"),
        (
            stand(SwitchState.SEARCH, num_steps_left=400),
            "nothing is decided",
            "lagom run --online -- python t.py    # with more steps",
        ),
        (
            stand(SwitchState.OFF, has_model=False),
            "nothing was tuned",
            "lagom run --online --adapters calls -- python t.py",
        ),
    ],
)
def test_every_end_has_a_result_a_reason_and_a_line_to_type(at: Stand, found: str, next_line: str) -> None:
    ending = of_tuning(at, Path("a b"), "python t.py")
    assert found in ending.found
    assert ending.why
    assert ending.next_line.startswith(next_line)
    assert [line.partition(":")[0] for line in ending.lines()] == ["result", "why", "next"]


def test_a_job_that_ended_early_says_how_many_steps_were_missing() -> None:
    ending = of_tuning(stand(SwitchState.VERDICT, num_steps_left=90), Path("out"), "COMMAND")
    assert ending.why == (
        "the job ended after 30 steps, while comparing with the default (so), which takes at most 90 more steps"
    )


def test_a_reason_that_the_state_says_already_is_not_said_again() -> None:
    recording = stand(SwitchState.RECORD, reason="the untouched job", num_steps_left=1)
    ending = of_tuning(recording, Path("out"), "COMMAND")
    assert ending.why == (
        "the job ended after 30 steps, while recording the untouched job, which takes at most 1 more step"
    )


def test_a_job_that_tuned_again_and_ended_early_still_has_what_it_saved() -> None:
    ending = of_tuning(stand(SwitchState.VERDICT, num_steps_left=90, num_saved=5), Path("out"), "COMMAND")
    assert ending.found.startswith("5 call sites are set in the saved settings")
    assert ending.next_line == "lagom run --prove out -- COMMAND"


def test_a_command_too_long_to_repeat_is_called_command() -> None:
    assert command_text({COMMAND_VARIABLE: json.dumps(["python", "my train.py"])}) == "python 'my train.py'"
    assert command_text({COMMAND_VARIABLE: json.dumps(["x" * 400])}) == command_text({}) == "COMMAND"
    assert command_text({COMMAND_VARIABLE: "{"}) == "COMMAND"


def check_of(ratios: list[float], default_s: float = 1.0) -> Check:
    """A proof's check that ran on until these rounds were over, default over configured."""
    check = Check(num_pairs=25, seed="0", max_slowdown=2.0, default_s=1.0, is_start=True, num_same=3)
    left = iter(ratios)
    for ratio in [ratios[0]] + [1.0] * 6:  # the first window, and the default against itself
        if not check.is_over:
            check.report(1 / ratio if check.next_arm is Arm.TUNED else 1.0)
    for ratio in left:
        for _ in Arm:
            if not check.is_over:
                check.report(default_s / ratio if check.next_arm is Arm.TUNED else default_s)
    return check


NOISE = (0.004, -0.003, 0.002, 0.005, -0.004, 0.001, -0.002, 0.003, -0.001, 0.002, -0.005, 0.004, 0.0, -0.003)


@pytest.mark.parametrize(
    ("ratio", "decision", "found"),
    [
        (1.2, ProofDecision.ADOPT, "adopt"),
        (0.8, ProofDecision.REJECT, "reject"),
        (1.0, ProofDecision.NO_DIFFERENCE, "no difference above"),
        (0.4, ProofDecision.REJECT, "reject"),
    ],
)
def test_a_proof_ends_in_adopt_reject_or_no_difference(
    tmp_path: Path, ratio: float, decision: ProofDecision, found: str
) -> None:
    check = check_of([ratio + noise for noise in NOISE * 2])
    assert check.is_over
    proof = of_proof(stand(SwitchState.DONE), check, subject=Path("lagom.json"), options=OPTIONS)
    assert proof.decision is decision
    assert proof.found.startswith(found)
    if ratio == 0.4:
        assert (proof.judgement, proof.reason) == (None, "steps take 2.48 times as long, in two windows running")
    elif decision is ProofDecision.NO_DIFFERENCE:
        assert float(proof.found.split()[-2]) < 2
    else:
        assert proof.judgement.low <= ratio <= proof.judgement.high
        assert "error rate 1 %" in proof.reason
    write_proof(tmp_path, proof)
    saved = json.loads((tmp_path / "proof.json").read_text())
    assert (saved["decision"], saved["steps_per_block"], len(saved["default_s"])) == (decision, 3, len(proof.default_s))
    page = render_proof(proof)
    assert (tmp_path / "report.html").read_text() == page
    for words in (proof.found, "lagom.json", proof.machine["system"], proof.versions["python"], "proof.json"):
        assert words in page
    assert page.count("<rect ") == min(len(proof.default_s), len(proof.configured_s)), "a bar for each pair"
    assert '<div class="type"><pre><code>' in page, "the line to type, to copy"
    assert "src=" not in page, "one file, which loads nothing"
    assert "<link" not in page


def test_a_proof_that_noise_decides_says_how_many_pairs_would_and_asks_for_them() -> None:
    noisy = [1.04 + 25 * noise for noise in (*NOISE, *NOISE[3:])]
    check = check_of(noisy[:25])
    assert check.is_over
    proof = of_proof(stand(SwitchState.DONE), check, subject=Path("lagom.json"), options=OPTIONS)
    assert proof.decision is ProofDecision.NO_DIFFERENCE
    needed = check.num_needed
    assert needed is not None
    assert 25 < needed <= MAX_PAIRS
    assert f"about {needed} pairs like these ({2 * OPTIONS.window_steps * needed} steps) would decide" in proof.reason
    assert f"closer limits: lagom run --prove lagom.json --pairs {max(needed, 50)} -- " in proof.next_line


def test_a_proof_that_was_cut_off_is_undecided_and_says_what_was_missing() -> None:
    check = check_of([1.02, 1.01, 1.03])
    assert not check.is_over
    proof = of_proof(stand(SwitchState.CHECK, num_steps_left=220), check, subject=Path("lagom.json"), options=OPTIONS)
    assert proof.decision is ProofDecision.UNDECIDED
    assert "the job ended after 30 steps" in proof.reason
    assert "at most 220 more steps were needed" in proof.reason
    assert proof.next_line.endswith("# with more steps")


@pytest.mark.parametrize("state", [SwitchState.DONE, SwitchState.WATCH, SwitchState.FROZEN, SwitchState.OFF])
def test_a_proof_that_was_given_up_says_why_and_how_else_to_prove_it(state: SwitchState) -> None:
    check = check_of([1.02, 1.01, 1.03])
    at = stand(state, num_steps=900, reason="the settings could not be judged: no step was measured")
    proof = of_proof(at, check, subject=Path("lagom.json"), options=OPTIONS)
    assert (proof.decision, proof.reason) == (ProofDecision.UNDECIDED, at.reason)
    assert proof.next_line == "lagom run --prove lagom.json --restarts 6 -- COMMAND"


def test_settings_of_another_job_prove_nothing_and_the_reason_is_theirs() -> None:
    at = stand(SwitchState.DONE, reason="nothing is set: the settings are not of this job")
    proof = of_proof(at, None, subject=Path("lagom.json"), options=OPTIONS)
    assert (proof.decision, proof.reason) == (ProofDecision.UNDECIDED, at.reason)


LAUNCHER = "lagom emulate --cluster h100_dgx --"


def test_a_job_on_emulated_gpus_says_so_and_its_next_line_emulates_them_again() -> None:
    tuned = of_tuning(stand(SwitchState.SEARCH, num_steps_left=4), Path("run"), "torchrun t.py").under(LAUNCHER)
    assert tuned.found.startswith("on emulated GPUs: nothing is decided")
    assert tuned.next_line == f"{LAUNCHER} lagom run --online -- torchrun t.py    # with more steps"
    assert tuned.under(LAUNCHER) == tuned
    look = Conclusion("found", "why", "lagom analyze seen/traces")
    assert look.under(LAUNCHER).next_line == look.next_line
    assert look.under("") == look


def test_a_proof_on_emulated_gpus_says_so_wherever_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGOM_EMULATION_COMMAND", LAUNCHER)
    proof = of_proof(stand(SwitchState.CHECK), None, subject=Path("lagom.json"), options=OPTIONS)
    assert proof.machine["emulated_by"] == LAUNCHER
    assert proof.next_line.startswith(f"{LAUNCHER} lagom run --prove lagom.json")
    assert proof.summary().startswith("result: on emulated GPUs: undecided: lagom.json")
    assert proof.conclusion.next_line == proof.next_line
