"""`lagom run --prove` by restarts: the job runs with and without what is proven, again and again, judged in pairs.

What needs a new process is proven so: an environment file, an FSDP2 plan, a table of the plug-in. Each pair is two runs
of the user's command in an order that a coin draws; a run counts by the median of its steps on rank 0, timed by the GPU
where there is one (`results/step_times`). The test is that of every verdict (`tuners/sequential`). Its error rate is
1 % where so many pairs are allowed that its large bet alone can decide, 5 % with fewer; the result says which.
"""

import contextlib
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Final

from lagom_overlap.errors import JobError
from lagom_overlap.interrupts import received
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.record import describe_machine, package_versions, utc_now
from lagom_overlap.report.proof_page import write_proof
from lagom_overlap.results.proof import ProofDecision, ProofResult, ProofWay, decision_of, next_line
from lagom_overlap.results.step_times import SETTLE, read_step_times
from lagom_overlap.tuners.sequential import ALPHA, Decision, Judgement, pairs_of_large_bet, proven_pairs
from lagom_overlap.units import format_seconds
from lagom_overlap.verbs.given import Given, GivenKind, given
from lagom_overlap.verbs.run import (
    PART_VARIABLE,
    TABLE_VARIABLE,
    LaunchRequest,
    PreparedLaunch,
    RunMode,
    is_one_of_several,
    nodes_named,
    prepare,
)

FEW_ALPHA: Final = 0.05
"""The error rate where fewer pairs are allowed than one of 1 % needs."""
MOST_PAIRS: Final = 50
LEAST_STEPS: Final = 5
"""Settled steps that a run needs for a median. Chosen."""
DEFAULT: Final = "default"
CONFIGURED: Final = "configured"

Runner = Callable[[PreparedLaunch], int]
"""Runs a prepared command to its end and returns its exit code."""


@dataclass(slots=True)
class _Pairs:
    """Median step times of the runs so far, by arm; whole pairs count."""

    times_s: dict[str, list[float]] = field(default_factory=lambda: {DEFAULT: [], CONFIGURED: []})

    @property
    def num(self) -> int:
        return min(map(len, self.times_s.values()))

    def judgement(self, most_pairs: int) -> Judgement | None:
        if self.num < 2:
            return None
        default_s, configured_s = (self.times_s[arm][: self.num] for arm in (DEFAULT, CONFIGURED))
        return proven_pairs(default_s, configured_s, most_pairs, alpha=error_rate(most_pairs))


def error_rate(most_pairs: int) -> float:
    """The error rate, on each side, of a proof of at most so many pairs."""
    return ALPHA if most_pairs >= pairs_of_large_bet(ALPHA) else FEW_ALPHA


def prove_by_restarts(
    request: LaunchRequest,
    most_pairs: int,
    environment: Mapping[str, str],
    *,
    say: Callable[[str], None],
    run: Runner | None = None,
) -> tuple[ProofResult, Path]:
    """Runs the pairs, writes proof.json and proof.html, and returns the result and the folder.

    Ctrl-C or SIGTERM ends the run under way and the proof, which then says what the pairs so far show.

    Raises:
        LagomError: if something cannot be started, or a run without what is proven fails or shows no steps.
    """
    if is_one_of_several(environment) or nodes_named(request.command, environment) > 1:
        raise JobError(
            "a proof by restarts starts the whole job from one place, not in each task: lagom run --prove WHAT -- srun "
            "COMMAND"
        )
    assert request.config is not None
    found = given(request.config)
    folder = RunFolder.create(request.out, RunMode.PROVE)
    asked = {"command": request.command, "mode": RunMode.PROVE, "config": found.path, "restarts": most_pairs}
    folder.write(RunRecord.now(RunKind.RUN, seed=0, request=asked))
    environment = {**environment, PART_VARIABLE: "1"}
    if environment.get(TABLE_VARIABLE):
        if found.kind in (GivenKind.PLAN, GivenKind.ENVIRONMENT):
            say(f"{TABLE_VARIABLE} of the environment decides in both arms")
        else:
            environment[TABLE_VARIABLE] = ""
            say(f"{TABLE_VARIABLE} of the environment is left out: the default arm runs untouched")
    pairs, reason, is_refuted = _Pairs(), "", False
    try:
        for number in range(most_pairs):
            for arm in _order(number):
                say(f"pair {number + 1} of at most {most_pairs}: {arm}")
                single = _request_of(request, found, arm, folder.path / f"{number + 1:02d}-{arm}")
                reason, is_refuted = _ran(single, arm, environment, pairs, run or _to_its_end)
                if reason:
                    break
            judgement = pairs.judgement(most_pairs)
            if reason or (judgement is not None and judgement.decision is not Decision.OPEN):
                break
            say(_so_far(pairs))
    except KeyboardInterrupt:
        reason = f"ended by a signal after {pairs.num} whole pairs"
    result = _result(request, found, pairs, most_pairs, reason, is_refuted=is_refuted)
    write_proof(folder.path, result)
    return result, folder.path


def _order(number: int) -> list[str]:
    """The arms of a pair, in the order that a coin draws."""
    arms = [DEFAULT, CONFIGURED]
    Random(f"restarts/{number}").shuffle(arms)
    return arms


def _request_of(request: LaunchRequest, found: Given, arm: str, out: Path) -> LaunchRequest:
    if arm == DEFAULT:
        return replace(request, mode=RunMode.PLANNED, config=None, out=out)
    return replace(request, mode=RunMode.FIXED, config=found.path, out=out)


def _ran(
    request: LaunchRequest, arm: str, environment: Mapping[str, str], pairs: _Pairs, run: Runner
) -> tuple[str, bool]:
    """Runs one; why the proof ends here (empty: it goes on), and whether that speaks against what is proven."""
    launch = prepare(request, environment)
    code = run(launch)
    assert launch.folder is not None, "only a disabled launch has none"
    if code:
        words = f"the job ended with exit code {code} {'with it' if arm == CONFIGURED else 'as it is'}"
        if arm == DEFAULT:
            raise JobError(f"nothing can be proven: {words} (files in {launch.folder})")
        return words, bool(pairs.times_s[DEFAULT])
    times = read_step_times(launch.folder)
    if times is None or times.median_s is None:
        raise JobError(f"nothing can be proven: no step of a run was timed, see its lines above ({launch.folder})")
    if len(times.settled_s) < LEAST_STEPS:
        raise JobError(
            f"nothing can be proven: a run has {times.num_steps} steps, at least {SETTLE + LEAST_STEPS + 1} are needed"
        )
    pairs.times_s[arm].append(times.median_s)
    return "", False


def _to_its_end(launch: PreparedLaunch) -> int:
    """The exit code of the command; a signal to us is passed on, and the command's end waited for."""
    process = subprocess.Popen(launch.command, executable=launch.program, env=dict(launch.environment))
    try:
        return process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM if received() else signal.SIGINT)
        process.wait()
        raise


def _so_far(pairs: _Pairs) -> str:
    latest = (pairs.times_s[arm][-1] for arm in (DEFAULT, CONFIGURED))
    default_s, configured_s = latest
    ratio = default_s / configured_s
    return f"default {format_seconds(default_s)}, configured {format_seconds(configured_s)} a step ({ratio:.3f}x)"


def _result(
    request: LaunchRequest, found: Given, pairs: _Pairs, most_pairs: int, ended: str, *, is_refuted: bool
) -> ProofResult:
    judgement = pairs.judgement(most_pairs)
    decision = ProofDecision.REJECT if is_refuted else decision_of(judgement)
    reason = ended or ("" if judgement is None else judgement.sentence())
    subject, command = str(found.path), shlex.join(request.command)
    return ProofResult(
        subject=subject,
        kind=found.kind,
        way=ProofWay.RESTARTS,
        decision=decision,
        reason=reason,
        judgement=judgement,
        default_s=tuple(pairs.times_s[DEFAULT][: pairs.num]),
        configured_s=tuple(pairs.times_s[CONFIGURED][: pairs.num]),
        steps_per_block=None,
        next_line=next_line(
            decision, shlex.quote(subject), command, more=f"--restarts {min(2 * most_pairs, MOST_PAIRS)}"
        ),
        command=request.command,
        machine=describe_machine(),
        versions=package_versions(),
        date=utc_now(),
    )
