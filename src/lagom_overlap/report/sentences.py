"""The verdict in words that a colleague understands; the same words in the page and in the terminal."""

from lagom_overlap.backends.base import Assignment, GroupProblem, Measurement
from lagom_overlap.collective import CommConfig, launch_of
from lagom_overlap.report.model import ENGINE_DEFAULT, EngineShare, TuneReport
from lagom_overlap.tune.journal import StepKind
from lagom_overlap.tune.verdict import DEFAULT_ARM, TUNED_ARM, PairedRatio, Verdict
from lagom_overlap.units import format_bytes

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


def num_search_steps(report: TuneReport) -> int:
    """Measurements of the search; the verdict's rounds are counted apart."""
    return sum(entry.step.kind is StepKind.SEARCH for entry in report.entries)


def _pairs_text(ratio: PairedRatio) -> str:
    pairs = f"{ratio.num_pairs} shuffled pairs" if ratio.num_pairs > 1 else "one pair"
    return f"median of {pairs}, quartiles {quartiles_text(ratio)}, {ratio.num_wins}/{ratio.num_pairs} wins"


def _speed_text(ratio: PairedRatio, than: str) -> str:
    if f"{ratio.median_ratio:.3f}" == "1.000":
        return f"as fast as {than}"
    if ratio.median_ratio >= 1:
        return f"{median_text(ratio)} faster than {than}"
    return f"slower than {than}: {median_text(ratio)} its speed"


def headline(report: TuneReport) -> str:
    """The verdict as one sentence."""
    verdict = report.verdict
    if verdict is None:
        num = num_search_steps(report)
        done = f"{num} measurement{'' if num == 1 else 's'} of the search"
        if report.interrupted:
            return f"No verdict: interrupted after {done}, before the paired A/B was complete."
        return f"No verdict: the run ended after {done} without a paired A/B."
    than = report.words_for(DEFAULT_ARM)
    if report.is_prediction:
        return _prediction(report, verdict, than)
    if report.changes_nothing:
        return f"Not adopted: the search found nothing better than {than}, which stays."
    if TUNED_ARM in verdict.failures:
        return f"Not adopted: tuned failed in the A/B ({verdict.failures[TUNED_ARM]}). {_upper(than)} stays."
    ratio = verdict.over_default
    claim = f"Tuned is {_speed_text(ratio, than)} ({_pairs_text(ratio)})"
    if verdict.adopted:
        return f"{claim}: adopted."
    return f"Not adopted: {claim[0].lower()}{claim[1:]}. {_refusal(verdict, than)}"


def _prediction(report: TuneReport, verdict: Verdict, than: str) -> str:
    """The word of a run in which nothing was run: never that something is adopted."""
    if report.changes_nothing:
        found = f"the search found nothing better than {than}"
    elif TUNED_ARM in verdict.failures:
        found = f"tuned cannot be predicted ({verdict.failures[TUNED_ARM]})"
    else:
        found = f"tuned would be {_speed_text(verdict.over_default, than)}"
    return f"A prediction, not an A/B: {found}. Nothing was run; only an A/B on the machine can adopt a setting."


def _refusal(verdict: Verdict, than: str) -> str:
    if verdict.over_default.q25 <= 1:
        return f"The lower quartile is not above 1, so {than} stays."
    return f"{_upper(than)} stays."


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def share_sentence(report: TuneReport) -> str:
    """What part of the gain is engine and what part is tuning; empty without a verdict."""
    share = report.engine_share
    if share is None or report.verdict is None:
        return ""
    if ENGINE_DEFAULT in report.verdict.failures:
        return f"What part is engine and what part is tuning is not known: {_failed(report, ENGINE_DEFAULT)}."
    if share.tuning is None:
        default = _upper(report.words_for(DEFAULT_ARM))
        return f"{default} runs on the same engine as tuned, so the whole difference is tuning."
    return f"{_engine_sentence(report, share)} Tuning alone: {_speed_text(share.tuning, 'that')} " + (
        f"(quartiles {quartiles_text(share.tuning)}, {share.tuning.num_wins}/{share.tuning.num_pairs} wins)."
    )


def _engine_sentence(report: TuneReport, share: EngineShare) -> str:
    engine = report.words_for(ENGINE_DEFAULT)
    if share.engine is None:
        return f"The engine alone ({engine}) was not paired with {report.words_for(DEFAULT_ARM)}."
    return (
        f"Engine alone ({engine}): {_speed_text(share.engine, report.words_for(DEFAULT_ARM))} "
        f"(quartiles {quartiles_text(share.engine)})."
    )


def _failed(report: TuneReport, arm: str) -> str:
    reason = "" if report.verdict is None else report.verdict.failures[arm]
    return f"{report.words_for(arm)} failed in the A/B ({reason})"


def failure_sentences(report: TuneReport) -> tuple[str, ...]:
    """The fixed settings that failed in the A/B and why."""
    failures = {} if report.verdict is None else report.verdict.failures
    return tuple(f"{_upper(_failed(report, arm))}." for arm in failures if arm not in (TUNED_ARM, ENGINE_DEFAULT))


def fixed_sentence(report: TuneReport) -> str:
    """How tuned compares with the best fixed setting; empty where none ran."""
    verdict = report.verdict
    if verdict is None or verdict.best_fixed is None or verdict.best_fixed not in verdict.over_baselines:
        return ""
    ratio = verdict.over_baselines[verdict.best_fixed]
    if ratio.num_pairs == 0:
        return ""
    than = f"the better of all knobs minimal and maximal ({report.words_for(verdict.best_fixed)})"
    return (
        f"Tuned is {_speed_text(ratio, than)} "
        f"(quartiles {quartiles_text(ratio)}, {ratio.num_wins}/{ratio.num_pairs} wins)."
    )


def busy_sentence(report: TuneReport) -> str:
    """That other work took the cores of a run on this machine's CPUs that was not adopted; else empty.

    A rank keeps about two threads busy, computing and communicating; a load beyond that and the cores is not ours.
    """
    judged = report.verdict is not None and not report.verdict.adopted and not report.changes_nothing
    load, cores = report.machine.get("load_1min"), report.machine.get("cores")
    if not judged or report.backend not in _ON_CPU or load is None or cores is None:
        return ""
    num_ranks = max(op.collective.num_ranks for problem in report.problems for op in problem.group.comms)
    if float(load) <= int(cores) + 2 * num_ranks:
        return ""
    return (
        f"The machine was busy: a load of {load} on {cores} cores at the end. On a quiet one the quartiles are closer."
    )


def change_text(before: float | None, after: float | None) -> str:
    """The change in per cent, signed: `"−12.3 %"`; empty where one side is missing."""
    if before is None or after is None or before <= 0:
        return ""
    change = (after - before) / before * 100
    return f"{change:+.1f} %".replace("-", "−") if abs(change) >= 0.05 else "0.0 %"


def comm_time(measurement: Measurement | None, index: int) -> float | None:
    """x_j of a measurement, None where there is none."""
    if measurement is None or index >= len(measurement.comm_s):
        return None
    return measurement.comm_s[index]
