"""A toy machine and a toy search, enough to fill a report; nothing here is judged."""

import random
from dataclasses import replace
from itertools import product

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig, ConfigSpace, Subspace
from lagom_overlap.results.tune import MeasuredSearch, TuneResult
from lagom_overlap.timeline import Span, SpanKind, Timeline
from lagom_overlap.tuners.journal import Entry, Step, StepKind
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement
from lagom_overlap.tuners.verdict import Verdict, judge
from lagom_overlap.units import KIB, MIB
from lagom_overlap.workload import CommOp, CompOp, Gemm, OverlapGroup

RUNGS = tuple(zip((1, 2, 3, 4, 6, 8, 16), (k * KIB for k in (64, 341, 684, 1024, 1366, 2048, 4096)), strict=True))
SPACE = ConfigSpace(
    (Subspace(num_channels=tuple(channels for channels, _ in RUNGS), chunk_bytes=tuple(chunk for _, chunk in RUNGS)),)
)
DEFAULT = CommConfig(num_channels=8, chunk_bytes=4 * MIB)


def rung(index: int) -> CommConfig:
    return CommConfig(num_channels=RUNGS[index][0], chunk_bytes=RUNGS[index][1])


def toy_group(name: str = "block/0", num_comms: int = 2, num_comps: int = 5, count: int = 32) -> OverlapGroup:
    comps = tuple(CompOp(name=f"matmul.{i}", work=Gemm(4096, 4096, 1024 * (1 + i % 3))) for i in range(num_comps))
    kinds = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
    comms = tuple(
        CommOp(name=f"{kinds[j % 2].value}.{j}", collective=Collective(kinds[j % 2], (48 + 16 * j) * MIB, 8))
        for j in range(num_comms)
    )
    return OverlapGroup(name=name, computations=comps, comms=comms, count=count)


def toy_problem(group: OverlapGroup) -> GroupProblem:
    num = len(group.comms)
    baselines = {"engine_default": (rung(5),) * num, "fixed_min": (rung(0),) * num, "fixed_max": (rung(6),) * num}
    return GroupProblem(group=group, spaces=(SPACE,) * num, default=(DEFAULT,) * num, baselines=baselines)


def toy_run(group: OverlapGroup, assignment: Assignment, noise: float = 1.0) -> Measurement:
    """Collectives one after the other slow the computations that they run during."""
    spans, clock, busy = [], 0.0, []
    for op, config in zip(group.comms, assignment, strict=True):
        channels, chunk = config.num_channels or 8, config.chunk_bytes or 2 * MIB
        bandwidth = 75e9 * channels / (channels + 5)
        overhead = 1 + 0.05 * (128 * KIB / chunk) + 0.02 * chunk / MIB
        length = op.collective.wire_bytes / bandwidth * overhead * noise
        spans.append(Span(name=op.name, kind=SpanKind.COMM, stream="comm", start_s=clock, end_s=clock + length))
        busy.append((clock, clock + length, 84 / (84 - channels) * (1 + 0.03 * channels * chunk / MIB / 4)))
        clock += length
    now = 0.0
    for op in group.computations:
        left, start = op.work.flops / 100e12 * noise, now
        for low, high, slow in busy:
            if left > 0 and low <= now < high:
                done = min(left, (high - now) / slow)
                left, now = left - done, now + done * slow
        now += left
        spans.append(Span(name=op.name, kind=SpanKind.COMP, stream="compute", start_s=start, end_s=now))
    timeline = Timeline(tuple(spans))
    comm_s = tuple(span.duration_s for span in spans if span.kind is SpanKind.COMM)
    return Measurement(makespan_s=timeline.makespan_s, comp_s=now, comm_s=comm_s, timeline=timeline)


def toy_search(problems: tuple[GroupProblem, ...]) -> tuple[list[Entry], dict[str, Assignment]]:
    """Lagom's way over the rungs: raise the collective with the smallest H until it stops paying."""
    entries: list[Entry] = []
    best: dict[str, tuple[float, Assignment]] = {}

    def run(group: OverlapGroup, assignment: Assignment, reason: str, h: dict[str, float]) -> Measurement:
        step = Step(
            number=len(entries),
            kind=StepKind.SEARCH,
            assignments={group.name: assignment},
            reasons={group.name: reason},
            priorities={group.name: dict(h)} if h else {},
        )
        result = toy_run(group, assignment)
        entries.append(Entry(step=step, outcomes={group.name: result}))
        if group.name not in best or result.makespan_s < best[group.name][0]:
            best[group.name] = (result.makespan_s, assignment)
        return result

    for problem in problems:
        group = problem.group
        run(group, problem.default, "default", {})
        levels = [0] * len(group.comms)
        h = dict.fromkeys(group.comm_names, 0.01)
        last = run(group, tuple(map(rung, levels)), "all at the minimum", h)
        active = set(range(len(levels)))
        while active and last.total_comm_s > last.comp_s and len(entries) < 2000:
            j = min(active, key=lambda index: (h[group.comm_names[index]], index))
            levels[j] += 1
            now = run(group, tuple(map(rung, levels)), f"raise {group.comm_names[j]}", dict(h))
            gain = last.comm_s[j] - now.comm_s[j]
            if gain <= 0 or levels[j] == len(RUNGS) - 1:
                active.discard(j)
            if gain > 0:
                h[group.comm_names[j]] = max(0.0, (now.comp_s - last.comp_s) / gain)
                last = now
            else:
                levels[j] -= 1
    return entries, {name: assignment for name, (_, assignment) in best.items()}


def toy_verdict(problems, recommended, entries, num_rounds=13, sigma=0.02) -> Verdict:
    rng = random.Random(7)
    times: dict[str, list[float]] = {}
    for round_, arm in product(range(num_rounds), ("default", "engine_default", "fixed_min", "fixed_max", "tuned")):
        outcomes, assignments = {}, {}
        for problem in problems:
            name = problem.group.name
            arms = {"default": problem.default, "tuned": recommended[name], **problem.baselines}
            assignments[name] = arms[arm]
            outcomes[name] = toy_run(problem.group, arms[arm], rng.lognormvariate(0, sigma))
        step = Step(number=len(entries), kind=StepKind.VERDICT, assignments=assignments, arm=arm, round=round_)
        entries.append(Entry(step=step, outcomes=outcomes))
        total = sum(problem.group.count * outcomes[problem.group.name].makespan_s for problem in problems)
        times.setdefault(arm, []).append(total)
    changed = any(recommended[p.group.name] != p.default for p in problems)
    return judge({arm: tuple(held) for arm, held in times.items()}, tuned_differs=changed, failures={})


def toy_report(groups: tuple[OverlapGroup, ...] | None = None, with_verdict: bool = True, **changes) -> TuneResult:
    problems = tuple(toy_problem(group) for group in groups or (toy_group(),))
    entries, recommended = toy_search(problems)
    verdict = toy_verdict(problems, recommended, entries) if with_verdict else None
    report = TuneResult(
        job="gpt-fsdp-gloo",
        backend="gloo",
        backend_description="gloo, 2 ranks on this machine, loopback",
        tuner="lagom",
        guarded=True,
        seed=0,
        verdict=verdict,
        date="2025-11-20 10:00 UTC",
        duration_s=94.0,
        repeats=5,
        machine={"machine": "x86_64, 2 cores", "memory": "8 GiB"},
        versions={"lagom-overlap": "0.1.0", "torch": "2.13.0"},
        arm_words={"default": "the native PyTorch call"},
        notes=("All ranks share one machine, so its cores are contended as a GPU's SMs would be, not alike.",),
        interrupted=not with_verdict,
        measured=MeasuredSearch(problems=problems, entries=tuple(entries), recommended=recommended),
    )
    return changed(report, **changes)


def changed(result: TuneResult, **changes) -> TuneResult:
    """The result with other fields, of its own or of its search."""
    of_search = {name: changes.pop(name) for name in ("problems", "entries", "recommended") if name in changes}
    return replace(result, **changes, measured=replace(result.search, **of_search))


def with_failure(report: TuneResult) -> TuneResult:
    """The report with its third search step turned into a failure."""
    entries = list(report.search.entries)
    entry = entries[2]
    entries[2] = replace(entry, outcomes=dict.fromkeys(entry.outcomes, Failure("too many channels for this message")))
    return changed(report, entries=tuple(entries))
