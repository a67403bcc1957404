"""PyTorch's operators in a Kineto trace: which ran, on what shapes, in which phase, how long; and the collectives.

Where the trace has GPU kernels, an operator takes what the kernels take that it launched, or that operators inside it
launched, joined by "External id"; a collective takes what its kernel takes. In a trace of CPU alone (gloo), an operator
takes its own time and a collective the time in which gloo's thread ran it (`gloo:*`), which holds the wait for ranks
that come later.

Operators nest: `aten::linear` calls `aten::addmm`. The outermost that the reader asks for is taken and what is inside
it belongs to it; collectives own what is inside them, whoever asks. The backward pass is what autograd's engine
evaluates, the optimizer what runs inside `Optimizer.step`.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import TraceError
from lagom_overlap.trace.chrome_reader import Args, EventReader, Header, TraceEvent
from lagom_overlap.trace.fields import num_elements, to_int, to_ns
from lagom_overlap.trace.files import is_sqlite, open_streams
from lagom_overlap.trace.gpu_trace import NO_TIME, NS_PER_S, GpuTrace, short_name
from lagom_overlap.trace.names import dtype_bytes, kind_of, whole_bytes
from lagom_overlap.trace.reader import ReadOptions, read_file
from lagom_overlap.trace.step_marks import STEP_NAME
from lagom_overlap.workload import Phase

_OPERATOR: Final = frozenset({"cpu_op", "Operator"})
_ANNOTATION: Final = "user_annotation"
_GPU: Final = frozenset({"kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset"})
COLLECTIVE_PREFIXES: Final = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")
_WAITS: Final = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
RUN_PREFIX: Final = "gloo:"
_BACKWARD: Final = "autograd::engine::evaluate_function"
_OPTIMIZER: Final = "Optimizer.step"
_MAX_TENSORS: Final = 10_000
"""Of one operator (foreach kernels have many): bounds the work on a damaged event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperator:
    """One operator as it ran: `kernel` in a capture's words (`"aten.mm"`), its tensors' shapes and bytes an element.

    `shapes` is empty where the trace was recorded without them; `phase` None where the trace has no autograd.
    """

    kernel: str
    seconds: float
    shapes: tuple[tuple[int, ...], ...] = ()
    element_bytes: tuple[int, ...] = ()
    phase: Phase | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCollective:
    """One collective as it ran; `num_bytes` (of the whole tensor) and `num_ranks` are 0 where the trace is silent."""

    kind: CollectiveKind
    seconds: float
    num_bytes: int = 0
    num_ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperators:
    """What ran in the profiler's steps of one rank, in order of start; `num_steps` 0: the trace marks none.

    `is_gpu` says that operators take their kernels' time.
    """

    file: str
    operators: tuple[TracedOperator, ...]
    collectives: tuple[TracedCollective, ...]
    num_steps: int
    is_gpu: bool


@dataclass(slots=True)
class CpuSpan:
    """A CPU event on its thread."""

    name: str
    start_ns: int
    end_ns: int
    external: int
    args: Args | None
    is_operator: bool = True
    phase: Phase | None = None
    kernel_ns: int = 0

    @property
    def duration_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns

    @property
    def short(self) -> str:
        """Its name without namespaces."""
        return self.name.rpartition("::")[2]


@dataclass(slots=True)
class CpuEvents:
    """What is kept of a file while its events pass by."""

    threads: dict[tuple[Any, Any], list[CpuSpan]] = field(default_factory=lambda: defaultdict(list))
    steps: list[tuple[int, int, str]] = field(default_factory=list)
    kernel_ns: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    num_kernels: int = 0

    def take(self, events: Iterable[TraceEvent]) -> None:
        """Keeps what matters of some events."""
        for event in events:
            if event.ph != "X" or type(event.name) is not str or type(event.cat) is not str:
                continue
            start_ns, length_ns = to_ns(event.ts), to_ns(event.dur)
            if start_ns is None or length_ns is None or length_ns < 0:
                continue
            if event.cat in _GPU:
                self.num_kernels += 1
                external = _external(event.args)
                if external > 0 and external != to_int(event.args.correlation if event.args else None):
                    self.kernel_ns[external] += length_ns
            elif event.cat == _ANNOTATION and event.name.startswith(STEP_NAME):
                self.steps.append((start_ns, start_ns + length_ns, event.name))
            elif event.cat in _OPERATOR or event.cat == _ANNOTATION:
                self._keep(event, start_ns, start_ns + length_ns)

    def _keep(self, event: TraceEvent, start_ns: int, end_ns: int) -> None:
        args = event.args
        if args is not None:
            args.kept()
        try:
            thread = self.threads[event.pid, event.tid]
        except TypeError:  # a thread named by a list: no profiler writes it
            return
        thread.append(CpuSpan(event.name, start_ns, end_ns, _external(args), args, event.cat != _ANNOTATION))


def _external(args: Args | None) -> int:
    if args is None:
        return -1
    return to_int(args.external_id if args.external_id is not None else args.external_id_old)


def read_operators(path: Path, wanted: Iterable[str]) -> TracedOperators:
    """The operators of these names (`"aten.mm"`) and all collectives of one rank's trace.

    Raises:
        TraceError: if the file cannot be read, is no Kineto trace of one rank, or holds no operator at all.
    """
    if path.is_dir():
        raise TraceError(f"{str(path)!r} is a folder; name the trace of one rank")
    if path.exists() and is_sqlite(path):
        raise TraceError(f"{short_name(path)}: an Nsight file has no PyTorch operators; record with torch.profiler")
    events, header, name = read_cpu_events(path)
    if not any(events.threads.values()):
        raise TraceError(f"{name}: no PyTorch operator in it; record with ProfilerActivity.CPU and record_shapes=True")
    asked = {kernel.replace(".", "::", 1) for kernel in wanted}
    taken, calls, runs = _walk(events, asked)
    is_gpu = events.num_kernels > 0
    if is_gpu:
        collectives = _gpu_collectives(path)
    else:
        collectives = _cpu_collectives(_inside(calls, events.steps), _inside(runs, events.steps), _num_ranks(header))
    operators = [
        TracedOperator(
            kernel=span.name.replace("::", ".", 1),
            seconds=(span.kernel_ns if is_gpu else span.duration_ns) / NS_PER_S,
            shapes=shapes,
            element_bytes=sizes,
            phase=span.phase,
        )
        for span in _inside(taken, events.steps)
        for shapes, sizes in [tensors_of(span.args)]
    ]
    return TracedOperators(
        file=name,
        operators=tuple(operator for operator in operators if operator.seconds > 0),
        collectives=collectives,
        num_steps=len(events.steps),
        is_gpu=is_gpu,
    )


def read_cpu_events(path: Path, index: int | None = None) -> tuple[CpuEvents, Header, str]:
    """(what is kept of a trace, what stands next to its events, its name): of the only one in the file, or by number.

    Raises:
        TraceError: if the file cannot be read, or holds several traces and no number says which.
    """
    cpu_events, header, name = CpuEvents(), Header(), ""
    with open_streams(path) as streams:
        for number, stream in enumerate(streams):
            if index is not None and number != index:
                continue
            if name:
                raise TraceError(f"{short_name(path)}: more than one trace in it; name the trace of one rank")
            name = stream.name
            reader = EventReader(stream)
            for events in reader.blocks():
                cpu_events.take(events)
            header = reader.header
            if index is not None:
                break
    if not name:
        raise TraceError(f"{short_name(path)}: an archive without a trace in it")
    return cpu_events, header, name


def pairs_of_runs(events: CpuEvents) -> list[tuple[CpuSpan, CpuSpan]]:
    """Each call of a collective with gloo's run of it."""
    _, calls, runs = _walk(events, set())
    return _paired(calls, runs)


def _paired(calls: Sequence[CpuSpan], runs: Sequence[CpuSpan]) -> list[tuple[CpuSpan, CpuSpan]]:
    """Each call with the first run that begins behind it and belongs to no earlier call: gloo keeps their order."""
    pairs = []
    waiting = iter(runs)
    for call in calls:
        run = next((run for run in waiting if run.start_ns >= call.start_ns), None)
        if run is not None:
            pairs.append((call, run))
    return pairs


def _walk(events: CpuEvents, asked: set[str]) -> tuple[list[CpuSpan], list[CpuSpan], list[CpuSpan]]:
    """(operators that were asked for, calls of collectives, gloo's runs of them), each in order of start."""
    has_autograd = any(span.name.startswith(_BACKWARD) for spans in events.threads.values() for span in spans)
    taken: list[CpuSpan] = []
    calls: list[CpuSpan] = []
    runs: list[CpuSpan] = []
    for spans in events.threads.values():
        stack: list[tuple[CpuSpan, CpuSpan | None, Phase | None]] = []
        for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
            while stack and stack[-1][0].end_ns <= span.start_ns:
                stack.pop()
            _, owner, phase = stack[-1] if stack else (None, None, Phase.FORWARD if has_autograd else None)
            if span.name.startswith(_BACKWARD):
                phase = Phase.BACKWARD
            elif span.name.startswith(_OPTIMIZER):
                phase = Phase.OPTIMIZER
            if owner is None:
                into = _list_of(span, asked, taken, calls, runs)
                if into is not None:
                    owner, span.phase = span, phase
                    into.append(span)
            if owner is not None and span.external > 0:
                owner.kernel_ns += events.kernel_ns.get(span.external, 0)
            stack.append((span, owner, phase))
    for kept in (taken, calls, runs):
        kept.sort(key=lambda span: span.start_ns)
    return taken, [call for call in calls if call.short not in _WAITS], runs


def _list_of(
    span: CpuSpan, asked: set[str], taken: list[CpuSpan], calls: list[CpuSpan], runs: list[CpuSpan]
) -> list[CpuSpan] | None:
    if span.name.startswith(COLLECTIVE_PREFIXES):
        return calls
    if span.name.startswith(RUN_PREFIX):
        return runs
    return taken if span.name in asked else None


def _inside(spans: Sequence[CpuSpan], steps: Sequence[tuple[int, int, str]]) -> list[CpuSpan]:
    """Those that start in one of the profiler's steps, or all where there are none."""
    if not steps:
        return list(spans)
    return [span for span in spans if any(start <= span.start_ns < end for start, end, _ in steps)]


def _num_ranks(header: Header) -> int:
    """The ranks of the only process group; 0 where there are several, or none is named."""
    info = header.distributed_info if type(header.distributed_info) is dict else {}
    return max(0, to_int(info.get("world_size"))) if to_int(info.get("pg_count")) == 1 else 0


def num_bytes_of(span: CpuSpan, kind: CollectiveKind | None, num_ranks: int) -> int:
    """The bytes of a call's whole tensor: where in and out are both given, the whole one is the larger."""
    shapes, sizes = tensors_of(span.args)
    given = [num_elements(list(shape)) * size for shape, size in zip(shapes, sizes, strict=True)]
    if span.name.startswith("c10d::"):
        return max(given, default=0)
    return whole_bytes(kind, sum(given), 0, num_ranks)


def _cpu_collectives(calls: Sequence[CpuSpan], runs: Sequence[CpuSpan], num_ranks: int) -> tuple[TracedCollective, ...]:
    collectives = []
    for call, run in _paired(calls, runs):
        kind = kind_of(call.short)
        if kind is None or not run.duration_ns:
            continue
        num_bytes = num_bytes_of(call, kind, num_ranks)
        seconds = run.duration_ns / NS_PER_S
        collectives.append(TracedCollective(kind=kind, seconds=seconds, num_bytes=num_bytes, num_ranks=num_ranks))
    return tuple(collectives)


def _gpu_collectives(path: Path) -> tuple[TracedCollective, ...]:
    traces = list(read_file(path, ReadOptions()))
    if len(traces) != 1:
        raise TraceError(f"{short_name(path)}: kernels of {len(traces)} GPUs in it; name the trace of one rank")
    trace = traces[0]
    return tuple(
        TracedCollective(
            kind=call.kind,
            seconds=call.duration_ns / NS_PER_S,
            num_bytes=call.num_bytes,
            num_ranks=call.num_ranks,
        )
        for call in trace.calls
        if call.kind is not None and call.duration_ns > 0 and _is_in_step(trace, call.event)
    )


def _is_in_step(trace: GpuTrace, event: int) -> bool:
    """By when the CPU launched it, as for operators."""
    launch_ns = int(trace.events.launch_ns[event])
    at_ns = int(trace.events.start_ns[event]) if launch_ns == NO_TIME else launch_ns
    return not trace.steps or any(step.start_ns <= at_ns < step.end_ns for step in trace.steps)


def tensors_of(args: Args | None) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """(shapes, bytes an element) of the tensors among an operator's arguments, those in lists one by one."""
    dims = bytes(args.input_dims) if args is not None else b""
    if args is None or len(dims) <= 2:
        return (), ()
    try:
        shapes, types = msgspec.json.decode(dims), msgspec.json.decode(bytes(args.input_type) or b"[]")
    except (msgspec.MsgspecError, RecursionError):
        return (), ()
    if type(shapes) is not list or type(types) is not list:
        return (), ()
    tensors: list[tuple[tuple[int, ...], int]] = []
    for shape, name in zip(shapes[:_MAX_TENSORS], types, strict=False):
        size = dtype_bytes(name) if type(name) is str else 0
        if type(shape) is not list:
            continue
        if shape and all(type(part) is list for part in shape):
            tensors += [(tuple(part), 0) for part in shape if all(type(n) is int for n in part)]
        elif all(type(n) is int for n in shape) and size:
            tensors.append((tuple(shape), size))
    return tuple(shape for shape, _ in tensors), tuple(size for _, size in tensors)
