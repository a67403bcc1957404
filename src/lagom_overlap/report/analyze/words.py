"""The analysis in words and cells; the same in the page and in the terminal."""

from collections import Counter

from lagom_overlap.analysis.advice import Advice
from lagom_overlap.analysis.collectives import CollectiveKey
from lagom_overlap.analysis.contention import MIN_PROOF, Contention
from lagom_overlap.analysis.hta import HtaFigures
from lagom_overlap.analysis.measures import Measures
from lagom_overlap.analysis.parts import GROUP, PHASE
from lagom_overlap.results.analyze import AnalyzeResult
from lagom_overlap.sim.what_if import COPY_ENGINES, GainEstimate
from lagom_overlap.trace.gpu_trace import NS_PER_S, KnobReach
from lagom_overlap.units import GB_PER_S, US, format_bytes, format_percent, format_seconds

_NONE = "–"
_LEAST_GB_PER_S = 0.1
"""Below it rates are shown in MB/s."""
_MAX_NAMES = 4
"""Names in a sentence; the others are counted."""
_NEARLY_ALL = 0.95
"""Of the time whose slowdown is known: above it the rest is not mentioned."""
_TELLING = 0.05
"""Of the span. Copies that take less are not worth a word in the headline."""


def time_text(length_ns: float) -> str:
    """A duration for people; a signed one keeps its sign."""
    return f"−{format_seconds(-length_ns / NS_PER_S)}" if length_ns < 0 else format_seconds(length_ns / NS_PER_S)


def rate_text(bytes_per_s: float) -> str:
    """Bytes per second for people: `"32.1 GB/s"`, `"0.8 MB/s"`."""
    rate = bytes_per_s / GB_PER_S
    return f"{rate:.1f} GB/s" if rate >= _LEAST_GB_PER_S else f"{1000 * rate:.1f} MB/s"


def percent_text(part: float, whole: float) -> str:
    """A share in per cent; a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else _NONE


def collective_text(key: CollectiveKey, only: str | None = None) -> str:
    """A collective in a table: `"all_reduce 30 MiB 8ch default_pg"`; without its communicator if that is `only`."""
    size = f" {format_bytes(key.num_bytes)}" if key.num_bytes else ""
    channels = f" {key.num_channels}ch" if key.num_channels else ""
    way = "".join(f" {word}" for word in (key.algorithm, key.protocol) if word)
    return f"{key.op}{size}{channels}{way}" + ("" if key.communicator == only else f" {key.communicator}")


def only_communicator(result: AnalyzeResult) -> str | None:
    """The communicator that all collectives run on; None where there are several, or none."""
    names = {row.key.communicator for row in result.analysis.findings.rows}
    return names.pop() if len(names) == 1 else None


def job_measures(result: AnalyzeResult) -> Measures:
    """The measures of all ranks added up."""
    first, *others = (rank.measures for rank in result.analysis.findings.ranks)
    for other in others:
        first = first + other
    return first


def summary(result: AnalyzeResult) -> str:
    """What a step is made of, what contention costs, and what to do first."""
    first = result.advice[0] if result.advice else None
    lines = (
        headline(result),
        contention_sentence(result),
        "" if first is None else f"{first.what}: {first.apply} ({format_seconds(first.predicted_gain_s)} a step)",
        *result.warnings,
    )
    return "\n".join(line for line in lines if line)


def headline(result: AnalyzeResult) -> str:
    """Where a step's time goes, in one or two sentences."""
    findings = result.analysis.findings
    timed = [rank for rank in findings.ranks if len(rank.trace.events)]
    if not timed:
        total = sum(row.total_ns for row in findings.rows)
        stands = [f"The job hangs: {hang}." for hang in findings.hangs[:1]]
        if len(findings.hangs) > 1:
            stands.append(f"{len(findings.hangs) - 1} more groups wait, most likely for that.")
        num = len(findings.ranks)
        files = f"{time_text(total)} of collectives over {num} rank{'s' * (num > 1)}; the files hold no timeline."
        return " ".join((*stands, files))
    job = job_measures(result)
    windows = sum(max(1, len(rank.steps)) for rank in timed)
    span = job.span_ns
    stretched = sum(findings.contention.of_rank)
    parts = [
        f"exposed communication {time_text(job.exposed_comm_ns / windows)} ({percent_text(job.exposed_comm_ns, span)})",
        f"computation stretched by it {_stretch_text(findings.contention, stretched / windows, span / windows)}",
        f"idle {time_text(job.idle_ns / windows)} ({percent_text(job.idle_ns, span)}"
        + ("" if timed[0].trace.is_cpu else f", of it waiting for the CPU {_host_text(job)}")
        + ")",
    ]
    if job.copies_alone_ns >= _TELLING * span > 0:
        copies_ns = job.copies_alone_ns
        parts.append(f"copies alone {time_text(copies_ns / windows)} ({percent_text(copies_ns, span)})")
    counts = {max(1, len(rank.steps)) for rank in timed}
    num = counts.pop() if len(counts) == 1 else windows
    steps = f"{num} step{'s' if num > 1 else ''}"
    if len(timed) > 1:
        steps = f"{steps} on {'each of ' if num < windows else ''}{len(timed)} ranks"
    subject, mean = "A step", f"mean of {steps}"
    if not any(rank.trace.steps for rank in timed):
        subject, mean = "The whole trace", f"mean of {len(timed)} ranks" if len(timed) > 1 else "no steps marked"
    return f"{subject} takes {time_text(span / windows)} ({mean}): {', '.join(parts)}."


def _host_text(measures: Measures) -> str:
    return percent_text(measures.host_bound_ns, measures.idle_ns)


def _stretch_text(contention: Contention, stretched_ns: float, span_ns: float) -> str:
    """The stretch in a step; where much of the overlapped computation has no twin, of how much it is known."""
    if contention.uncovered_ns and not contention.total.num_overlapped:
        return "unknown"
    known = contention.covered_ns / max(1, contention.covered_ns + contention.uncovered_ns)
    part = (
        f", measured for {100 * known:.0f} % of the overlapped computation"
        if contention.uncovered_ns and known < _NEARLY_ALL
        else ""
    )
    return f"{time_text(stretched_ns)} ({percent_text(stretched_ns, span_ns)}{part})"


def _hta_cells(name: str, figures: HtaFigures) -> tuple[str, ...]:
    return (
        name,
        format_seconds(figures.span_us * US),
        format_seconds(figures.compute_us * US),
        format_seconds(figures.comm_us * US),
        format_seconds((figures.comm_us - figures.overlap_us) * US),
        _NONE if figures.overlap_pct is None else f"{figures.overlap_pct:.2f} %",
        _NONE,
        format_seconds(figures.idle_us * US),
    )


def has_steps(result: AnalyzeResult) -> bool:
    """Whether any rank's trace marks steps; else a whole trace counts as one."""
    return any(rank.trace.steps and rank.steps for rank in result.analysis.findings.ranks)


def ranks_head(result: AnalyzeResult) -> str:
    """What a row of `rank_cells` is of."""
    if result.compat is not None:
        return "rank, sum as HTA has it"
    return "rank, per step" if has_steps(result) else "rank, whole trace"


def collectives_head(result: AnalyzeResult, only: str | None = None) -> str:
    """What a row of `collective_cells` is of."""
    scope = "sum" if not _is_timed(result) else "per step" if has_steps(result) else "per trace"
    return f"collective, {scope}" if only is None else f"{scope}, on {only}"


def _is_timed(result: AnalyzeResult) -> bool:
    return any(len(rank.trace.events) for rank in result.analysis.findings.ranks)


def _num_windows(result: AnalyzeResult) -> int:
    """What sums over the job are divided by: its steps over all ranks; 1 where there is no timeline."""
    return result.analysis.findings.num_windows if _is_timed(result) else 1


def _shared(part_ns: float, whole_ns: float) -> str:
    """A time, and on a line below its share of the step."""
    return f"{time_text(part_ns)}\n{percent_text(part_ns, whole_ns)}" if whole_ns else time_text(part_ns)


def _step_ns(result: AnalyzeResult) -> float:
    """The step of the average rank."""
    return job_measures(result).span_ns / _num_windows(result) if _is_timed(result) else 0.0


def rank_cells(result: AnalyzeResult) -> list[tuple[str, ...]]:
    """One row per rank with a timeline, its step and the parts of it in time and per cent; sums with `--compat hta`."""
    rows: list[tuple[str, ...]] = []
    for index, rank in enumerate(result.analysis.findings.ranks):
        if not len(rank.trace.events):
            continue
        name = f"rank {rank.trace.rank}" if rank.trace.rank is not None else rank.trace.file
        if result.analysis.hta:
            rows.append(_hta_cells(name, result.analysis.hta[index]))
            continue
        measures, num = rank.measures, max(1, len(rank.steps))
        step_ns = measures.span_ns / num
        rows.append(
            (
                name,
                time_text(step_ns),
                _shared(measures.compute_ns / num, step_ns),
                _shared(measures.comm_ns / num, step_ns),
                _shared(measures.exposed_comm_ns / num, step_ns),
                percent_text(measures.overlap_ns, measures.comm_ns),
                _shared(rank.stretched_ns / num, step_ns),
                _shared(measures.idle_ns / num, step_ns),
            )
        )
    return rows


def _count(number: float) -> str:
    """A count per step, which need not be whole."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def part_cells(result: AnalyzeResult) -> list[tuple[str, ...]]:
    """One row per phase, process group and wire, where there are two of them to compare; per step."""
    num, step_ns = _num_windows(result), _step_ns(result)
    several = Counter(part.by for part in result.analysis.findings.parts)
    return [
        (
            f"{part.by} {part.name}" if part.by == GROUP else part.name,
            _count(part.num_calls / num),
            _shared(part.compute_ns / num, step_ns) if part.by == PHASE else _NONE,
            _shared(part.comm_ns / num, step_ns),
            _shared(part.exposed_ns / num, step_ns),
            _NONE if part.overlap_pct is None else f"{part.overlap_pct:.1f} %",
        )
        for part in result.analysis.findings.parts
        if several[part.by] > 1
    ]


def collective_cells(result: AnalyzeResult, only: str | None = None) -> list[tuple[str, ...]]:
    """One row per kind of call, the longest in total first, per step of the average rank (`collectives_head`).

    `only` as `collective_text` has it.
    """
    blame = result.analysis.findings.contention.blame
    num, step_ns = _num_windows(result), _step_ns(result)
    return [
        (
            collective_text(row.key, only),
            _count(row.count / num),
            _shared(row.total_ns / num, step_ns),
            _shared(row.exposed_ns / num, step_ns) if _is_timed(result) else _NONE,
            _shared(blame.get(row.key, 0.0) / num, step_ns) if _is_timed(result) else _NONE,
            _NONE if row.waiting_ns is None else _shared(row.waiting_ns / num, step_ns),
            _NONE if row.busbw_bytes_per_s is None else rate_text(row.busbw_bytes_per_s),
        )
        for row in result.analysis.findings.rows
    ]


def contention_sentence(result: AnalyzeResult) -> str:
    """What is known about contention, and of how much nothing is."""
    contention = result.analysis.findings.contention
    overlapped_ns = contention.covered_ns + contention.uncovered_ns
    if not overlapped_ns:
        return "No computation runs during a collective: nothing is stretched."
    if not contention.total.num_overlapped:
        return f"{time_text(overlapped_ns)} of computation in all runs during collectives, none of it also alone."
    interval = ""
    if contention.total.low is not None and contention.total.high is not None:
        interval = f" (95 %: {contention.total.low:.2f}–{contention.total.high:.2f})"
    more = f"; another {time_text(contention.uncovered_ns)} of it has no run alone to compare with"
    without = more if contention.uncovered_ns else ""
    return (
        f"During collectives the same kernels take {contention.total.slowdown:.2f}×{interval} as long as alone, over "
        f"{time_text(contention.covered_ns)} of computation in all{without}.{_too_few(contention)}"
    )


def _too_few(contention: Contention) -> str:
    """Why no advice rests on the stretch, where no collective was met by enough runs; else empty."""
    most_alone = max((row.num_alone for row in contention.by_collective.values()), default=0)
    most = max((min(row.num_alone, row.num_overlapped) for row in contention.by_collective.values()), default=0)
    if most >= MIN_PROOF:
        return ""
    which = f"{most_alone} alone" if most_alone < MIN_PROOF else f"{most} during one collective"
    return (
        f" Too few runs for advice: {which} at most, advice takes {MIN_PROOF} of each. Profile more steps, or steps in "
        "which the kernels also run without a collective."
    )


def unreachable_sentence(result: AnalyzeResult) -> str:
    """The communication that no knob reaches, by name; empty where a knob reaches all of it."""
    beyond = [row.key for row in result.analysis.findings.rows if row.key.reach is KnobReach.NONE]
    if not beyond or any(rank.trace.is_cpu for rank in result.analysis.findings.ranks):  # gloo's are not NCCL's to set
        return ""
    names = list(dict.fromkeys(collective_text(key) for key in beyond))
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    time_s, step_s = result.unreachable_comm_s / _num_windows(result), _step_ns(result) / NS_PER_S
    share = f" per {'step' if has_steps(result) else 'trace'} ({percent_text(time_s, step_s)})" if step_s else " in all"
    return (
        f"{format_seconds(time_s)} of communication{share} is beyond every knob of NCCL: "
        f"{', '.join(names[:_MAX_NAMES])}{more}."
    )


def contention_cells(result: AnalyzeResult, only: str | None = None) -> list[tuple[str, ...]]:
    """One row per kernel class and collective, the costliest first; `only` as `collective_text` has it.

    Runs are all that were seen, the stretch is per step of the average rank.
    """
    rows: list[tuple[str, ...]] = []
    num = _num_windows(result)
    for row in result.analysis.findings.contention.classes:
        slowdown = row.found
        interval = _NONE if slowdown.low is None or slowdown.high is None else f"{slowdown.low:.2f}–{slowdown.high:.2f}"
        rows.append(
            (
                f"{row.kernel_class} | {collective_text(row.collective, only)}",
                str(slowdown.num_overlapped),
                f"{slowdown.slowdown:.2f}×",
                interval,
                time_text(slowdown.stretched_ns / num),
            )
        )
    return rows


def advice_texts(result: AnalyzeResult) -> list[tuple[str, str, str, str]]:
    """(gain, what, evidence, line) of every piece of advice."""
    return [
        (
            f"up to {format_seconds(advice.predicted_gain_s)} per step{_predicted(result, advice)}",
            advice.what,
            advice.evidence,
            advice.apply,
        )
        for advice in result.advice
    ]


def _predicted(result: AnalyzeResult, advice: Advice) -> str:
    """What the model predicts of the same change where that is no gain: the trace alone gives a bound, no more."""
    answer = next((answer for answer in result.what_ifs if answer.change == advice.change), None)
    if answer is None or answer.verdict is GainEstimate.GAIN:
        return ""
    of_all = "" if advice.change == COPY_ENGINES.change else " for all calls"
    return f"; predicted{of_all}: {format_percent(answer.share, signed=True)}"
