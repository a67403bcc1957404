"""A rank that computes on the CPU, from a Kineto trace without GPU events: threads in place of streams.

What computes is each thread's outermost operators, but for those that only hold others: autograd's nodes, calls of
collectives and waits for them. What communicates is what gloo's threads run (`gloo:*`); a collective's time contains
the wait for ranks that come later. A call's kind, bytes and ranks are those of the `c10d::` operator that it answers,
in order: gloo builds a reduce-scatter of an all-reduce.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from lagom_overlap.errors import TraceError
from lagom_overlap.trace.chrome_reader import Header
from lagom_overlap.trace.event_columns import EventColumns
from lagom_overlap.trace.fields import to_int
from lagom_overlap.trace.gpu_trace import (
    NO_TIME,
    RANK_IN_NAME,
    ROLE_CODES,
    UNKNOWN,
    CommCall,
    EventRole,
    GpuTrace,
    KnobReach,
    ProfilerStep,
)
from lagom_overlap.trace.names import kind_of, op_of
from lagom_overlap.trace.operators import (
    COLLECTIVE_PREFIXES,
    RUN_PREFIX,
    CpuEvents,
    CpuSpan,
    num_bytes_of,
    pairs_of_runs,
    read_cpu_events,
)
from lagom_overlap.trace.step_marks import StepMarks, phase_of
from lagom_overlap.workload import Phase

_HOLDERS: Final = re.compile(
    r"autograd::|torch::autograd::|\w*Backward\d*$|CompiledFunction|## Call|Torch-Compiled Region"
    r"|enumerate\(DataLoader\)|Optimizer\.|ProfilerStep|DistributedDataParallel|DDP|FSDP::|nn\.Module|record_param_comms"
)
"""Operators and annotations that hold others, and hooks that wait, within them."""
_STEP_NUMBER: Final = re.compile(r"#\s?(\d{1,15})")


def read_cpu_trace(path: Path, index: int, fallback: TraceError) -> GpuTrace:
    """The trace number `index` of a file.

    Raises:
        TraceError: `fallback` if it holds no collective and no operator that computes.
    """
    cpu_events, header, name = read_cpu_events(path, index)
    computes = [(thread, span) for thread, spans in cpu_events.threads.items() for span in _outermost(spans)]
    every = [span for spans in cpu_events.threads.values() for span in spans]
    every.sort(key=lambda span: span.start_ns)
    runs = [span for span in every if span.name.startswith(RUN_PREFIX)]
    if not computes or not runs:
        raise fallback
    thread_of = {id(span): thread for thread, spans in cpu_events.threads.items() for span in spans}
    numbers = {thread: number for number, thread in enumerate(cpu_events.threads)}
    columns = EventColumns()
    shapes: dict[bytes, int] = {}
    added: list[CpuSpan] = []
    for thread, span in [*computes, *((thread_of[id(run)], run) for run in runs)]:
        is_run = span.name.startswith(RUN_PREFIX)
        dims = bytes(span.args.input_dims) if span.args is not None else b""
        columns.add(
            start_ns=span.start_ns,
            end_ns=span.end_ns,
            name=span.name,
            device=0,
            stream=numbers[thread],
            role=ROLE_CODES[EventRole.COMM if is_run else EventRole.COMPUTE],
            shape=shapes.setdefault(dims, len(shapes)) if len(dims) > 2 else UNKNOWN,
        )
        added.append(span)
    launch = np.full(len(columns), NO_TIME, dtype=np.int64)
    events, order = columns.build(launch, columns.column("shape"))
    tids = [str(tid) for _, tid in cpu_events.threads]
    threads = tuple(f"thread {tids[number]}" for number in sorted({numbers[thread_of[id(span)]] for span in added}))
    info = header.distributed_info if type(header.distributed_info) is dict else {}
    rank, world = to_int(info.get("rank")), to_int(info.get("world_size"))
    named = RANK_IN_NAME.search(name)
    if rank < 0 and named is not None and len(named[1]) < 8:
        rank = int(named[1])
    row_of = {id(added[number]): row for row, number in enumerate(order.tolist())}
    return GpuTrace(
        file=name,
        format="Kineto, CPU only",
        rank=rank if rank >= 0 else None,
        events=replace(events, streams=threads),
        calls=_calls(cpu_events, runs, row_of, header),
        steps=_steps(cpu_events),
        world_size=world if world > 0 else None,
        is_cpu=True,
        phases=_phases(every),
        frameworks=frozenset(_frameworks(every)),
        warnings=(
            "no GPU event: operators on the CPU and gloo's threads are measured in place of kernels and streams",
        ),
    )


def _outermost(spans: Sequence[CpuSpan]) -> list[CpuSpan]:
    """The outermost operators of a thread that compute."""
    outermost: list[CpuSpan] = []
    busy_until = np.iinfo(np.int64).min
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        if span.start_ns < busy_until or (not span.is_operator and not span.name.startswith(RUN_PREFIX)):
            continue
        if _HOLDERS.match(span.name):
            continue
        busy_until = span.end_ns
        if not span.name.startswith((*COLLECTIVE_PREFIXES, RUN_PREFIX)) and span.end_ns > span.start_ns:
            outermost.append(span)
    return outermost


def _phases(spans: Sequence[CpuSpan]) -> tuple[tuple[Phase, int, int], ...]:
    """Backward passes and optimizer steps: autograd's nodes follow each other within the pass."""
    marks = StepMarks()
    for span in spans:
        phase = phase_of(span.name)
        if phase is not None:
            marks.phase_spans.append((phase, span.start_ns, span.end_ns))
    return marks.phases()


def _frameworks(spans: Sequence[CpuSpan]) -> set[str]:
    frameworks = set()
    for span in spans:
        if span.name.startswith("FSDP::"):
            frameworks.add("FSDP")
        elif span.name.startswith("DistributedDataParallel"):
            frameworks.add("DDP")
    return frameworks


def _steps(events: CpuEvents) -> tuple[ProfilerStep, ...]:
    steps: dict[int, ProfilerStep] = {}
    for at, (start, end, name) in enumerate(sorted(events.steps)):
        number = _STEP_NUMBER.search(name)
        step = ProfilerStep(number=int(number[1]) if number else at, start_ns=start, end_ns=end)
        steps.setdefault(step.number, step)
    return tuple(sorted(steps.values(), key=lambda step: step.start_ns))


def _calls(events: CpuEvents, runs: Sequence[CpuSpan], row_of: dict[int, int], header: Header) -> tuple[CommCall, ...]:
    info = header.distributed_info if type(header.distributed_info) is dict else {}
    groups = info.get("pg_config")
    only = groups[0] if type(groups) is list and len(groups) == 1 and type(groups[0]) is dict else {}
    num_ranks = max(0, to_int(only.get("pg_size"))) or (max(0, to_int(info.get("world_size"))) if only else 0)
    description = only.get("pg_desc")
    communicator = description if type(description) is str and description not in ("", "undefined") else "gloo"
    asked = {id(run): call for call, run in pairs_of_runs(events)}
    comm_calls = []
    for run in runs:
        call = asked.get(id(run))
        words = run.name if call is None else call.short
        kind = kind_of(words)
        comm_calls.append(
            CommCall(
                event=row_of[id(run)],
                op=op_of(words),
                kind=kind,
                communicator=communicator,
                reach=KnobReach.NONE,
                duration_ns=run.duration_ns,
                num_ranks=num_ranks,
                num_bytes=(num_bytes_of(call, kind, num_ranks) if call else 0) or num_bytes_of(run, kind, num_ranks),
            )
        )
    comm_calls.sort(key=lambda call: call.event)
    return tuple(comm_calls)
