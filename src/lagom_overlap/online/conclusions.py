"""The three lines that a run of `lagom run` ends with, from what its session saw; and the result of a proof."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from lagom_overlap.export.run_variables import (
    ADAPTERS_VARIABLE,
    COMMAND_VARIABLE,
    COMPARE_VARIABLE,
    CONFIG_VARIABLE,
    TUNER_VARIABLE,
)
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.messages import SETTLED, SwitchState
from lagom_overlap.record import describe_machine, emulated_by, package_versions, utc_now
from lagom_overlap.results.conclusion import Conclusion, command_line, line_under, online_line
from lagom_overlap.tuners.problem import MAX_PAIRS

if TYPE_CHECKING:  # the rank that wrote a proof loads it
    from lagom_overlap.online.ranks.check import Check
    from lagom_overlap.results.proof import ProofResult

BY_RESTARTS: Final = "--restarts 6"
"""What proves the same where the running job cannot be judged, with the least number of pairs."""
_FLAGS: Final = (
    ("--tuner", TUNER_VARIABLE),
    ("--compare", COMPARE_VARIABLE),
    ("--adapters", ADAPTERS_VARIABLE),
    ("--config", CONFIG_VARIABLE),
)
"""What was asked for with --online, and where the launcher left it."""
_ENDED: Final = (*SETTLED, SwitchState.OFF, SwitchState.FROZEN)
"""States in which nothing more is tried or judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Where an online tuner stands at the end: its state and words, and how far it has come.

    `has_model`: a model was found to tune. `num_steps_left` are the most that the state under way still takes.
    `num_saved` settings are saved in the run's folder, by the last search that was decided.
    """

    state: SwitchState
    reason: str
    num_settings: int
    num_steps: int
    num_steps_left: int
    has_model: bool
    is_on_gloo: bool
    searches: bool = True
    num_saved: int = 0


def command_words(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The job's command, as `lagom run` was given it."""
    try:
        return msgspec.json.decode(environment.get(COMMAND_VARIABLE, "[]"), type=tuple[str, ...])
    except msgspec.MsgspecError:
        return ()


def command_text(environment: Mapping[str, str] = os.environ) -> str:
    """The job's command for a shell."""
    return command_line(command_words(environment))


def of_tuning(stand: Stand, folder: Path, command: str) -> Conclusion:
    """What came of tuning, or of settings that were given."""
    again = f"lagom run --observe -- {command}"
    if not stand.has_model:
        why = "no step of a model with parameters to train was seen in this job"
        if stand.is_on_gloo and not os.environ.get(ADAPTERS_VARIABLE):
            why = (
                "no module that FSDP2 or DDP wraps made a step; on gloo DTensor's collectives are out of reach, and "
                "those that the job itself calls are tuned if asked for"
            )
            calls = f"lagom run --online --adapters calls -- {command}"
            return Conclusion("nothing was tuned", why, f"{calls}    # where the job calls torch.distributed itself")
        return Conclusion("nothing was tuned", why, f"{again}    # says which collectives the job calls")
    where = shlex.quote(str(folder))
    if stand.state in SETTLED and stand.num_settings:
        found = f"{_sites(stand.num_settings)} set other than by default"
        return Conclusion(found, stand.reason, f"lagom run --prove {where} -- {command}")
    if stand.state in SETTLED:
        found = "nothing is set"
        return Conclusion(found, stand.reason, f"{command}    # as it is: there is nothing to set")
    if stand.state in _ENDED:
        return Conclusion("nothing is set, everything runs untouched", stand.reason, again)
    reason = "" if stand.reason in stand.state.words else f" ({stand.reason})"
    done = f"the job ended after {_steps(stand.num_steps)}, while {stand.state.words}{reason}"
    if not stand.searches:
        return Conclusion("nothing is decided", done, f"{command}    # with more steps")
    left = stand.num_steps_left
    why = f"{done}, which takes at most {_more(left)}" if left else done
    if stand.num_saved:  # steps became slower, and it tuned again
        found = f"{_sites(stand.num_saved)} set in the saved settings, of the search before; the last one is undecided"
        return Conclusion(found, why, f"lagom run --prove {where} -- {command}")
    return Conclusion("nothing is decided, nothing was saved", why, f"{_as_asked(command)}    # with more steps")


def _as_asked(command: str, environment: Mapping[str, str] = os.environ) -> str:
    """The line that began this tuning."""
    return online_line(command, {flag: environment.get(name) for flag, name in _FLAGS})


def of_proof(stand: Stand, check: "Check | None", *, subject: Path, options: OnlineOptions) -> "ProofResult":
    """The result of a proof inside the job, over or cut off."""
    # Not at the top: one rank, once, at the end.
    from lagom_overlap.results.proof import (  # noqa: PLC0415
        ProofDecision,
        ProofResult,
        ProofWay,
        decision_of,
        next_line,
        outlook,
    )

    judgement = None if check is None else check.judgement
    decision, flags = decision_of(judgement), ""
    if check is None:
        reason = of_tuning(stand, subject, "").why
    elif not check.is_over and stand.state in _ENDED:  # given up, while the job may run on
        reason, flags = stand.reason, BY_RESTARTS
    elif not check.is_over:
        reason = f"the job ended after {_steps(stand.num_steps)}: {check.words}; at most "
        reason += f"{_more(stand.num_steps_left)} were needed"
    elif judgement is None or check.is_too_slow:
        decision, reason = ProofDecision.REJECT, check.words
    else:
        needed = check.num_needed
        reason = judgement.sentence(steps_per_pair=2 * (options.window_steps - 2))  # first and last do not count
        words = outlook(decision, judgement, needed, steps_per_pair=2 * options.window_steps)
        reason += words
        if words and needed is not None and needed <= MAX_PAIRS and judgement.num_pairs < MAX_PAIRS:
            flags = f"--pairs {min(MAX_PAIRS, max(needed, 2 * judgement.num_pairs))}"  # needed is an estimate
    default_s, configured_s = ((), ()) if check is None else check.times_s
    return ProofResult(
        subject=str(subject),
        kind="settings that online tuning saved",
        way=ProofWay.IN_JOB,
        decision=decision,
        reason=reason,
        judgement=judgement,
        default_s=default_s,
        configured_s=configured_s,
        steps_per_block=options.window_steps - 2,
        next_line=line_under(
            emulated_by(), next_line(decision, shlex.quote(str(subject)), command_text(), flags=flags)
        ),
        command=command_words(),
        machine=describe_machine(),
        versions=package_versions(),
        date=utc_now(),
    )


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _more(count: int) -> str:
    return "1 more step" if count == 1 else f"{count} more steps"


def _sites(count: int) -> str:
    return "1 call site is" if count == 1 else f"{count} call sites are"
