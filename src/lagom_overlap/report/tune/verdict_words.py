"""The verdict in words that a colleague understands; the same words in the page and in the terminal."""

from typing import Final

from lagom_overlap.collective import CommConfig, launch_of
from lagom_overlap.results.conclusion import ELSEWHERE, line_under
from lagom_overlap.results.tune import ENGINE_DEFAULT, EngineShare, PredictedGain, TuneResult
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Measurement
from lagom_overlap.tuners.sequential import Decision
from lagom_overlap.tuners.verdict import DEFAULT_ARM, TUNED_ARM, PairedRatio, Verdict
from lagom_overlap.units import format_bytes, format_percent, format_seconds

_ON_CPU = ("gloo", "workers")
"""Backends whose ranks share this machine's cores with whatever else runs there."""
KNOB_WORDS = {
    "algorithm": "algorithm",
    "protocol": "protocol",
    "transport": "transport",
    "num_channels": "channels",
    "num_threads": "threads",
    "chunk_bytes": "chunk",
}
"""The knobs of a configuration in the order in which they are shown, in words."""


def knob_text(config: CommConfig, knob: str) -> str:
    """One knob's value for people; `"auto"` where the engine decides."""
    value = getattr(config, knob)
    if value is None:
        return "auto"
    return format_bytes(value) if knob == "chunk_bytes" else str(value)


def config_text(config: CommConfig) -> str:
    """A configuration in one line: `"ring, 8 channels, 2 MiB chunk"`; `"untouched"` where no knob is set."""
    words = []
    for knob, word in KNOB_WORDS.items():
        if getattr(config, knob) is not None:
            text = knob_text(config, knob)
            words.append(f"{text} {word}" if knob in ("num_channels", "num_threads", "chunk_bytes") else text)
    return ", ".join(words) or "untouched"


def launch_text(problem: GroupProblem, tuned: Assignment) -> str:
    """How a group's computation is launched before and after, in one line; empty where nothing could be tried."""
    if problem.launches.is_untouched:
        return ""
    before, after = launch_of(problem.default), launch_of(tuned)
    return str(before) if before == after else f"{before} → {after}"


def launch_lines(assignment: Assignment) -> tuple[str, ...]:
    """One line on the computation's side of what was measured; none where it was untouched."""
    launch = launch_of(assignment)
    return () if launch.is_untouched else (f"computation: {launch}",)


def ratio_text(ratio: float, *others: float) -> str:
    """A ratio with two digits, with three where it or one of `others` is within 2 % of 1."""
    return f"{ratio:.{_digits(ratio, *others)}f}×"


def _digits(*ratios: float) -> int:
    return 3 if any(abs(ratio - 1) < 0.02 for ratio in ratios) else 2


def quartiles_text(ratio: PairedRatio) -> str:
    """The quartiles: `"1.15–1.21"`."""
    digits = _digits(ratio.median_ratio, ratio.q25, ratio.q75)
    return f"{ratio.q25:.{digits}f}–{ratio.q75:.{digits}f}"


def median_text(ratio: PairedRatio) -> str:
    """The median with as many digits as its quartiles: `"1.18×"`."""
    return ratio_text(ratio.median_ratio, ratio.q25, ratio.q75)


def _pairs_text(ratio: PairedRatio) -> str:
    pairs = f"{ratio.num_pairs} shuffled pairs" if ratio.num_pairs > 1 else "one pair"
    return f"median of {pairs}, quartiles {quartiles_text(ratio)}, {ratio.num_wins}/{ratio.num_pairs} wins"


def _speed_text(ratio: PairedRatio, than: str) -> str:
    if f"{ratio.median_ratio:.3f}" == "1.000":
        return f"as fast as {than}"
    if ratio.median_ratio >= 1:
        return f"{median_text(ratio)} faster than {than}"
    return f"slower than {than}: {median_text(ratio)} its speed"


def printable(text: str) -> str:
    """The text with a mark for what would move the cursor."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def step_sentence(result: TuneResult) -> str:
    """What the settings are worth of the whole step; empty where the step has no price."""
    if result.step_s is None:
        return ""
    whole = f"the whole step takes {format_seconds(result.step_s)}, as lagom simulate predicts it"
    if result.changes_nothing:
        return f"{_upper(whole)}."
    if result.tuned_step_s is None:
        return f"{_upper(whole)}; with these settings it is not priced, only its groups are."
    gain = f"{ratio_text(result.step_s / result.tuned_step_s)}, {change_text(result.step_s, result.tuned_step_s)}"
    return (
        f"Of the whole step, as lagom simulate predicts it: {format_seconds(result.step_s)} → "
        f"{format_seconds(result.tuned_step_s)} ({gain})."
        f"{'' if result.tuned_step_s < result.step_s else ' What the groups gain, the step does not.'}"
    )


def headline(result: TuneResult) -> str:
    """The verdict as one sentence."""
    verdict = result.verdict
    if verdict is None:
        num = result.num_measurements
        done = f"{num} measurement{'' if num == 1 else 's'} of the search"
        if result.interrupted:
            return f"No verdict: interrupted after {done}, before the paired A/B was complete."
        return f"No verdict: the run ended after {done} without a paired A/B."
    than = result.words_for(DEFAULT_ARM)
    if result.is_prediction:
        return _prediction(result, verdict, than)
    if result.changes_nothing:
        return f"Not adopted: the search found nothing better than {than}, which stays."
    if TUNED_ARM in verdict.failures:
        return f"Not adopted: tuned failed in the A/B ({verdict.failures[TUNED_ARM]}). {_upper(than)} stays."
    ratio = verdict.over_default
    judgement = verdict.judgement
    is_even = judgement is not None and judgement.decision in (Decision.OPEN, Decision.NO_DIFFERENCE)
    speed = (
        f"not measurably different from {than}: {median_text(ratio)} its speed" if is_even else _speed_text(ratio, than)
    )
    claim = f"Tuned is {speed} ({_pairs_text(ratio)})"
    if verdict.adopted and result.is_simulated:
        return f"Predicted, not measured: {claim[0].lower()}{claim[1:]}. Only an A/B on the machine can adopt it."
    if verdict.adopted:
        return f"{claim}: adopted."
    return f"Not adopted: {claim[0].lower()}{claim[1:]}. {_refusal(verdict, than)}"


def summary(result: TuneResult) -> str:
    """The verdict, what was run, and the caveats."""
    guard = "guarded" if result.guarded else "unguarded"
    what = f"{result.backend_description}; {result.tuner} ({guard}), {result.num_measurements} measurements."
    step = (step_sentence(result),) if result.step_s is not None else ()
    return "\n".join((f"{result.job}: {headline(result)}", *step, what, *result.notes))


def _prediction(result: TuneResult, verdict: Verdict, than: str) -> str:
    """The word of a run in which nothing was run: never that something is adopted."""
    if result.changes_nothing:
        outcome = f"the search found nothing better than {than}"
    elif TUNED_ARM in verdict.failures:
        outcome = f"tuned cannot be predicted ({verdict.failures[TUNED_ARM]})"
    else:
        outcome = f"tuned would be {_speed_text(verdict.over_default, than)}"
    gain = _gain_text(result.predicted) if result.predicted is not None and not result.changes_nothing else ""
    return (
        f"A prediction, not an A/B: {outcome}.{gain} Nothing was run; only an A/B on the machine can adopt a setting."
    )


def _gain_text(gain: PredictedGain) -> str:
    """What of a whole step would be saved, with the model's own error; a sentence behind a blank."""
    on = f"{gain.num_held_out} windows that it was not fitted to" if gain.is_held_out else "what it was fitted to"
    error = f"the model's error on {on}"
    if not gain.is_beyond_error:
        return (
            f" Of the step it would save {format_seconds(gain.saving_s)}, {error} is {format_seconds(gain.error_s)}: "
            "nothing is recommended."
        )
    if gain.limits is None:
        return (
            f" Of the step of {format_seconds(gain.step_s)} it would save "
            f"{format_percent(gain.saving_s / gain.step_s)}, "
            "without an interval: what changes ran too seldom in the trace to hold windows out; record more steps."
        )
    low, high = gain.limits
    saved = f"{format_percent(low)} to {format_percent(high)}"
    return f" Of the step of {format_seconds(gain.step_s)} it would save {saved}, by {error}."


def _refusal(verdict: Verdict, than: str) -> str:
    if verdict.judgement is None:
        return f"{_upper(than)} stays."
    return f"By the sequential test tuned is {verdict.judgement.sentence()}. Nothing was changed."


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


UNDO: Final = "# to undo: start the job without lagom run"
_FINDS: Final = "lagom run --online -- COMMAND    # finds and proves settings in the job itself"


def next_commands(result: TuneResult, folder: str = "RUN") -> tuple[str, ...]:
    """What to type next, a command a line, first the one that is advised; `UNDO` behind those that set something.

    `folder` is the run's, as a shell takes it; COMMAND is what starts the training job.
    """
    if result.interrupted:
        return (f"lagom resume {folder}    # continues where this ended",)
    gain = result.predicted
    launcher = ELSEWHERE if gain is not None and gain.is_emulated else ""
    if result.is_prediction and (result.changes_nothing or not (gain and gain.is_beyond_error)):
        online = line_under(launcher, "lagom run --online -- COMMAND")
        return (f"{online}    # measures in the job itself what a trace cannot tell",)
    if not is_of_use(result):
        return ("lagom run --online -- COMMAND    # tries settings in the job itself; nothing better was found here",)
    if (
        result.num_stages > 1 or result.backend == "gloo"
    ):  # a file of settings holds one rank's calls, and stages differ
        return (_FINDS,)
    if result.is_prediction:
        prove = line_under(launcher, f"lagom run --prove {folder} -- COMMAND")
        return (f"{prove}    # judges it in the job itself",)
    unproven = ", unproven" if result.is_simulated else ""
    sets = f"lagom run --config {folder} -- COMMAND    # starts the job with these settings{unproven}"
    if result.is_simulated:
        return (_FINDS, sets, UNDO)
    return (sets, f"lagom export {folder} --format plugin    # writes them for NCCL; other forms: --help", UNDO)


def is_of_use(result: TuneResult) -> bool:
    """Whether something was found that is worth setting or proving."""
    if result.verdict is None or not result.verdict.adopted or result.changes_nothing:
        return False
    # What the groups gain, the whole step may not.
    return result.step_s is None or result.tuned_step_s is None or result.tuned_step_s < result.step_s


def share_sentence(result: TuneResult) -> str:
    """What part of the gain is engine and what part is tuning; empty without a verdict."""
    share = result.engine_share
    if share is None or result.verdict is None:
        return ""
    if ENGINE_DEFAULT in result.verdict.failures:
        return f"What part is engine and what part is tuning is not known: {_failed(result, ENGINE_DEFAULT)}."
    if share.tuning is None:
        if result.is_simulated:
            return ""  # a model has no engines
        default = _upper(result.words_for(DEFAULT_ARM))
        return f"{default} runs on the same engine as tuned, so the whole difference is tuning."
    return f"{_engine_sentence(result, share)} Tuning alone: {_speed_text(share.tuning, 'that')} " + (
        f"(quartiles {quartiles_text(share.tuning)}, {share.tuning.num_wins}/{share.tuning.num_pairs} wins)."
    )


def _engine_sentence(result: TuneResult, share: EngineShare) -> str:
    engine = result.words_for(ENGINE_DEFAULT)
    if share.engine is None:
        return f"The engine alone ({engine}) was not paired with {result.words_for(DEFAULT_ARM)}."
    return (
        f"Engine alone ({engine}): {_speed_text(share.engine, result.words_for(DEFAULT_ARM))} "
        f"(quartiles {quartiles_text(share.engine)})."
    )


def _failed(result: TuneResult, arm: str) -> str:
    reason = "" if result.verdict is None else result.verdict.failures[arm]
    return f"{result.words_for(arm)} failed in the A/B ({reason})"


def failure_sentences(result: TuneResult) -> tuple[str, ...]:
    """The fixed settings that failed in the A/B and why."""
    failures = {} if result.verdict is None else result.verdict.failures
    return tuple(f"{_upper(_failed(result, arm))}." for arm in failures if arm not in (TUNED_ARM, ENGINE_DEFAULT))


def fixed_sentence(result: TuneResult) -> str:
    """How tuned compares with the best fixed setting; empty where none ran."""
    verdict = result.verdict
    if verdict is None or verdict.best_fixed is None or verdict.best_fixed not in verdict.over_baselines:
        return ""
    ratio = verdict.over_baselines[verdict.best_fixed]
    if ratio.num_pairs == 0:
        return ""
    than = f"{result.words_for(verdict.best_fixed)}, the best setting without a search"
    is_even = ratio.num_pairs > 1 and ratio.q25 < 1 < ratio.q75
    speed = f"no better than {than}: {median_text(ratio)} its speed" if is_even else _speed_text(ratio, than)
    return f"Tuned is {speed} (quartiles {quartiles_text(ratio)}, {ratio.num_wins}/{ratio.num_pairs} wins)."


def busy_sentence(result: TuneResult) -> str:
    """That other work took the cores of a run on this machine's CPUs that was not adopted; else empty.

    A rank keeps about two threads busy, computing and communicating; a load beyond that and the cores is not ours.
    """
    judged = result.verdict is not None and not result.verdict.adopted and not result.changes_nothing
    load, cores = result.machine.get("load_1min"), result.machine.get("cores")
    if not judged or result.backend not in _ON_CPU or load is None or cores is None:
        return ""
    num_ranks = max(op.collective.num_ranks for problem in result.search.problems for op in problem.group.comms)
    if float(load) <= int(cores) + 2 * num_ranks:
        return ""
    return f"The machine was busy: a load of {load} on {cores} cores at the end. On a quiet one fewer rounds tell more."


def change_text(before: float | None, after: float | None) -> str:
    """The change in per cent, signed: `"-12.3 %"`; empty where one side is missing."""
    if before is None or after is None or before <= 0:
        return ""
    return format_percent((after - before) / before, signed=True)


def comm_time(measurement: Measurement | None, index: int) -> float | None:
    """x_j of a measurement, None where there is none."""
    if measurement is None or index >= len(measurement.comm_s):
        return None
    return measurement.comm_s[index]
