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

from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.export.run_variables import PART_VARIABLE, RunMode
from lagom_overlap.interrupts import received
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.record import describe_machine, emulated_by, package_versions, utc_now
from lagom_overlap.report.proof import write_proof
from lagom_overlap.results.conclusion import line_under
from lagom_overlap.results.proof import ProofDecision, ProofResult, ProofWay, decision_of, next_line, outlook
from lagom_overlap.results.step_times import SETTLE, read_step_times
from lagom_overlap.tuners.sequential import ALPHA, Decision, Judgement, more_pairs, pairs_of_large_bet, proven_pairs
from lagom_overlap.units import format_seconds
from lagom_overlap.verbs.given import Given, GivenKind, given
from lagom_overlap.verbs.run import (
    TABLE_VARIABLE,
    LaunchRequest,
    PreparedLaunch,
    check_launch,
    is_one_of_several,
    nodes_named,
    prepare,
)

FEW_ALPHA: Final = 0.05
"""The error rate where fewer pairs are allowed than one of 1 % needs."""
MOST_PAIRS: Final = 50
"""As `cli.flags.MOST_RESTARTS`: a hundred runs of the job."""
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

    def num_needed(self, most_pairs: int) -> int | None:
        """About how many pairs like these decide."""
        default_s, configured_s = (self.times_s[arm][: self.num] for arm in (DEFAULT, CONFIGURED))
        return more_pairs(default_s, configured_s, alpha=error_rate(most_pairs))


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
    """Runs the pairs, writes proof.json and report.html, and returns the result and the folder.

    Ctrl-C or SIGTERM ends the run under way and the proof, which then says what the pairs so far show; so does a run
    that fails once there is a whole pair.

    Raises:
        LagomError: if something cannot be started, or a run without what is proven fails or shows no steps, before the
            first pair is whole.
    """
    if is_one_of_several(environment) or nodes_named(request.command, environment) > 1:
        raise JobError(
            "a proof by restarts starts the whole job from one place, not in each task: lagom run --prove WHAT -- srun "
            "COMMAND"
        )
    assert request.config is not None
    subject = given(request.config)
    check_launch(replace(request, mode=RunMode.FIXED, config=subject.path), environment)
    folder = RunFolder.create(request.out, RunMode.PROVE)
    asked = {"command": request.command, "mode": RunMode.PROVE, "config": subject.path, "restarts": most_pairs}
    folder.write(RunRecord.now(RunKind.RUN, seed=0, request=asked))
    environment = {**environment, PART_VARIABLE: "1"}
    if environment.get(TABLE_VARIABLE):
        if subject.kind in (GivenKind.PLAN, GivenKind.ENVIRONMENT):
            say(f"{TABLE_VARIABLE} of the environment decides in both arms")
        else:
            environment[TABLE_VARIABLE] = ""
            say(f"{TABLE_VARIABLE} of the environment is left out: the default arm runs untouched")
    runs = _Runs(request, subject, folder.path, environment, say, run or _to_its_end)
    reason, is_refuted = _run_pairs(runs, most_pairs)
    result = _result(request, subject, runs.pairs, most_pairs, reason, is_refuted=is_refuted)
    write_proof(folder.path, result)
    return result, folder.path


def _run_pairs(runs: "_Runs", most_pairs: int) -> tuple[str, bool]:
    """Runs pairs until they decide; what ended them before, if anything, and whether that refutes what is proven."""
    pairs = runs.pairs
    try:
        for number in range(most_pairs):
            runs.pair(number, most_pairs)
            judgement = pairs.judgement(most_pairs)
            if judgement is not None and judgement.decision is not Decision.OPEN:
                break
            runs.say(_so_far(pairs))
    except KeyboardInterrupt:
        return f"ended by a signal after {pairs.num} whole pairs", False
    except _ConfiguredFailed as failure:
        # A node may fail under either arm: only what never ran well, where the default did, is refuted.
        is_refuted = not pairs.times_s[CONFIGURED]
        return (str(failure) if is_refuted else f"{failure}, after {pairs.num} whole pairs"), is_refuted
    except (LagomError, OSError) as error:
        if not pairs.num:
            raise
        return f"{error}, after {pairs.num} whole pairs", False
    return "", False


def _order(number: int) -> list[str]:
    """The arms of a pair, in the order that a coin draws."""
    arms = [DEFAULT, CONFIGURED]
    Random(f"restarts/{number}").shuffle(arms)
    return arms


class _ConfiguredFailed(Exception):  # noqa: N818 - it says how the job ended
    """A run with what is proven did not end well, in words."""


@dataclass(slots=True)
class _Runs:
    """The runs of a proof, each in a folder of its own below `folder`. Their warnings are said once."""

    request: LaunchRequest
    found: Given
    folder: Path
    environment: Mapping[str, str]
    say: Callable[[str], None]
    run: Runner
    pairs: _Pairs = field(default_factory=_Pairs)
    warned: set[str] = field(default_factory=set)

    def pair(self, number: int, most_pairs: int) -> None:
        """Runs both arms and keeps their times.

        Raises:
            _ConfiguredFailed: if the job ended with an error with what is proven, and ran without it.
            LagomError: if a run cannot be started, or proves nothing.
        """
        failure: _ConfiguredFailed | None = None
        for arm in _order(number):
            if failure is not None and self.pairs.times_s[DEFAULT]:
                break
            self.say(f"pair {number + 1} of at most {most_pairs}: {arm}")
            try:
                self._run_arm(arm, self.folder / f"{number + 1:02d}-{arm}")
            except _ConfiguredFailed as error:
                failure = error  # whether the job itself is at fault, only a run of the default tells
        if failure is not None:
            raise failure

    def _run_arm(self, arm: str, out: Path) -> None:
        is_default = arm == DEFAULT
        mode, config = (RunMode.PLANNED, None) if is_default else (RunMode.FIXED, self.found.path)
        launch = prepare(replace(self.request, mode=mode, config=config, out=out), self.environment)
        for warning in launch.warnings:
            if warning not in self.warned:
                self.warned.add(warning)
                self.say(warning)
        if code := self.run(launch):
            words = f"the job ended with exit code {code} {'as it is' if is_default else 'with it'}"
            raise (JobError if is_default else _ConfiguredFailed)(f"{words} (files in {launch.folder})")
        assert launch.folder is not None, "only a disabled launch has none"
        times = read_step_times(launch.folder)
        if times is None or times.median_s is None:
            raise JobError(f"no step of a run was timed, see its lines above ({launch.folder})")
        if len(times.settled_s) < LEAST_STEPS:
            raise JobError(f"a run has {times.num_steps} steps, at least {SETTLE + LEAST_STEPS + 1} are needed")
        self.pairs.times_s[arm].append(times.median_s)


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
    request: LaunchRequest, proven: Given, pairs: _Pairs, most_pairs: int, ended: str, *, is_refuted: bool
) -> ProofResult:
    judgement = pairs.judgement(most_pairs)
    decision = ProofDecision.REJECT if is_refuted else decision_of(judgement)
    reason = ended or ("" if judgement is None else judgement.sentence())
    if judgement is not None and not ended:
        reason += outlook(decision, judgement, pairs.num_needed(most_pairs))
    subject, command = str(proven.path), shlex.join(request.command)
    more = most_pairs if ended else min(2 * most_pairs, MOST_PAIRS)  # what was cut off is to be done, not longer
    return ProofResult(
        subject=subject,
        kind=proven.kind,
        way=ProofWay.RESTARTS,
        decision=decision,
        reason=reason,
        judgement=judgement,
        default_s=tuple(pairs.times_s[DEFAULT][: pairs.num]),
        configured_s=tuple(pairs.times_s[CONFIGURED][: pairs.num]),
        steps_per_block=None,
        next_line=line_under(
            emulated_by(),
            next_line(
                decision,
                shlex.quote(subject),
                command,
                flags=f"--restarts {more}",
                is_longest=most_pairs == MOST_PAIRS,
            ),
        ),
        command=request.command,
        machine=describe_machine(),
        versions=package_versions(),
        date=utc_now(),
    )
