"""What to change, each with its evidence in this trace; a rule that cannot show evidence stays silent.

Where all stay silent, `looked_for` says what was looked for, and why nothing can be gained.

Every rule is one function from `Findings` to at most a few `Advice`. A predicted gain is per step of the average rank
and is an upper bound where the sentence says "at most". Not covered, because a Kineto trace does not show it:
CUDA_DEVICE_MAX_CONNECTIONS (a queue and a true dependency look alike), the wire chunk (no field holds it).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from lagom_overlap.analysis.advice import Advice, describe, stretch
from lagom_overlap.analysis.advice_on_order import larger_buckets, prefetch, shared_communicator, waiting_buckets
from lagom_overlap.analysis.advice_on_sms import carve_out, copy_engine, fewer_channels, more_channels
from lagom_overlap.analysis.advice_on_waits import blocking_launches, host_bound, late_peers, pipeline_bubbles
from lagom_overlap.analysis.findings import Findings
from lagom_overlap.sim.what_if import WhatIf
from lagom_overlap.trace.gpu_trace import NS_PER_S

_MIN_GAIN: Final = 0.002
"""Advice worth less than this part of a step is left out."""
WORTH: Final = 0.02
"""Less exposed communication than this part of a step is not worth a search."""
_RULES: Final[tuple[Callable[[Findings], Iterator[Advice]], ...]] = (
    fewer_channels,
    more_channels,
    larger_buckets,
    waiting_buckets,
    shared_communicator,
    prefetch,
    carve_out,
    copy_engine,
    host_bound,
    blocking_launches,
    late_peers,
    pipeline_bubbles,
)


def advice_of(findings: Findings) -> tuple[Advice, ...]:
    """All advice that this trace gives evidence for and that is worth at least `_MIN_GAIN` of a step, best first."""
    span_s = sum(rank.measures.span_ns for rank in findings.ranks) / NS_PER_S / findings.num_windows
    advice_of_rules = [advice for rule in _RULES for advice in rule(findings)]
    worth = [
        advice
        for advice in advice_of_rules
        if advice.predicted_gain_s >= _MIN_GAIN * span_s and advice.predicted_gain_s > 0
    ]
    return tuple(sorted(worth, key=lambda advice: (-advice.predicted_gain_s, advice.rule, advice.what)))


def without_losses(every_advice: Sequence[Advice], answers: Sequence[WhatIf]) -> tuple[Advice, ...]:
    """The advice without what the model predicts to lose: the trace alone gives an upper bound of a gain."""
    losing = {answer.change for answer in answers if answer.gain_s < 0}
    return tuple(advice for advice in every_advice if advice.change not in losing)


def looked_for(findings: Findings, losing: Sequence[Advice] = ()) -> str:
    """What the rules looked for, and why none of it can be gained here: what is said where there is no advice.

    `losing` is what they found and the model predicts to lose.
    """
    timed = [rank for rank in findings.ranks if len(rank.trace.events)]
    if not timed:
        if findings.hangs:
            return "The job hangs in the call above; no setting of a collective helps before that is mended."
        return (
            "Without a timeline only sizes and bandwidths can be compared: no size of a collective is much slower than "
            "a like one here. A torch.profiler trace of the same steps tells what is exposed."
        )
    span_ns = sum(rank.measures.span_ns for rank in timed)
    exposed_ns = sum(rank.measures.exposed_comm_ns for rank in timed)
    comm_ns = sum(rank.measures.comm_ns for rank in timed)
    if not comm_ns:
        return "No collective runs: there is nothing to overlap. Give a trace of a job with several ranks."
    parts = [f"{100 * exposed_ns / span_ns:.1f} % of the step is exposed communication"]
    if exposed_ns < WORTH * span_ns:
        parts.append("more overlap cannot gain more than that")
    else:
        row = max(findings.rows, key=lambda row: (row.exposed_ns, row.key))
        parts.append(
            f"most of it {describe(row.key)}, and nothing in the trace says that it was late, queued behind its own "
            "communicator, slower than its like, or waiting for another rank"
        )
    total = findings.contention.total
    if findings.contention.by_collective and total.is_proven:
        parts.append(f"computation takes {stretch(total)} during collectives, with no collective to blame for enough")
    else:
        parts.append("no stretch of computation is proven")
    host_ns = sum(rank.measures.host_bound_ns for rank in timed)
    parts.append(f"{100 * host_ns / span_ns:.1f} % waits for the CPU")
    changes = ", ".join(dict.fromkeys(advice.change for advice in losing))
    outcome = f"nothing that is predicted to pay (not {changes})" if losing else "nothing"
    return f"{len(_RULES)} rules found {outcome}: {'; '.join(parts)}."
