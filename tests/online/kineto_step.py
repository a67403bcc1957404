"""A step's GPU events written by hand, as PyTorch's profiler writes them; and a step that runs, by a small simulation.

The simulation shares nothing with what it examines: streams are queues that the host has filled before the step begins,
a collective takes what it is told to take, and the computation slows down while collectives run.
"""

import json
from dataclasses import dataclass

from lagom_overlap.trace.reader import ReadOptions, read_file

COMPUTE, COMM, COPY = 7, 20, 21
SCATTER = 22
NEVER = float("inf")


class Step:
    """A step's events; the host's order is the order of the calls here. Times are in microseconds."""

    def __init__(self):
        self.events = [{"ph": "M", "name": "process_name"}, {"ph": "X", "cat": "kernel", "args": {"stream": "x"}}]
        self.correlation = 0

    def trace(self, tmp_path):
        """The events as PyTorch's profiler writes them, read as any trace is."""
        path = tmp_path / f"step{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        (trace,) = read_file(path, ReadOptions())
        return trace

    def _add(self, cat, name, ts, dur, **args):
        self.correlation += 1
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "ts": ts,
                "dur": dur,
                "args": args | {"device": 0, "correlation": self.correlation},
            }
        )
        return self.correlation

    def compute(self, start, length, stream=COMPUTE):
        return self._add("kernel", "ampere_bf16_gemm", start, length, stream=stream)

    def nccl(self, what, start, length, *, op, nelems=1 << 20, out_nelems=None, channels=16, stream=COMM):
        return self._add(
            "kernel",
            f"ncclDevKernel_{what}(ncclDevKernelArgsStorage<4096ul>)",
            start,
            length,
            stream=stream,
            grid=[channels, 1, 1],
            dtype="BFloat16",
            **{"Collective name": op, "In msg nelems": nelems, "Out msg nelems": out_nelems or nelems, "Group size": 8},
        )

    def host(self, name, ts, **args):
        """What the host did: a launch shares its correlation with what it launched, a mark of the step has none."""
        cat = "cuda_runtime" if args else "user_annotation"
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 0.001, "args": args})

    def launched(self, ts=0.0):
        """All since the last time was launched by the host at this time."""
        done = {event["args"]["correlation"] for event in self.events if event.get("cat") == "cuda_runtime"}
        for event in [event for event in self.events if event.get("cat") == "kernel"][1:]:
            if event["args"]["correlation"] not in done:
                self.host("cudaLaunchKernel", ts, correlation=event["args"]["correlation"])

    def wait(self, stream, waited_for, recorded):
        self._add(
            "cuda_sync",
            "Stream Wait Event",
            0,
            0,
            stream=stream,
            wait_on_stream=waited_for,
            wait_on_cuda_event_record_corr_id=recorded,
        )


@dataclass
class Op:
    """What the host hands to a stream: a kernel of some work, a collective, or a wait for an op of another stream."""

    what: str
    stream: int
    length: float = 0.0
    waits_for: int | None = None  # number of the op
    start: float = NEVER
    end: float = NEVER


class Program:
    """What the host launches in a step."""

    def __init__(self):
        self.ops = []

    def compute(self, length, stream=COMPUTE):
        return self._add(Op("compute", stream, length))

    def collective(self, what, stream=COMM):
        return self._add(Op(what, stream))

    def wait(self, stream, op):
        return self._add(Op("wait", stream, waits_for=op))

    def _add(self, op):
        self.ops.append(op)
        return len(self.ops) - 1

    def run(self, lengths, slower=1.0):
        """Runs the step: collective number i takes `lengths[i]`, computation `slower` times as long meanwhile."""
        times = iter(lengths)
        for op in self.ops:
            op.start = op.end = NEVER
            if op.what not in ("compute", "wait"):
                op.length = next(times)
        left = {number: op.length for number, op in enumerate(self.ops)}
        queues = {}
        for number, op in enumerate(self.ops):
            queues.setdefault(op.stream, []).append(number)
        now = 0.0
        while any(queues.values()):
            self._begin(queues, now)
            running = [queue[0] for queue in queues.values() if queue and self.ops[queue[0]].start <= now]
            is_slowed = any(self.ops[number].what not in ("compute", "wait") for number in running)
            rates = {n: 1 / slower if self.ops[n].what == "compute" and is_slowed else 1.0 for n in running}
            passed = min(left[number] / rates[number] for number in running)
            now += passed
            for number in running:
                left[number] -= passed * rates[number]
                if left[number] <= 1e-9:
                    self.ops[number].end = now
                    queues[self.ops[number].stream].pop(0)
        return now

    def _begin(self, queues, now):
        """Starts what can, and passes waits that are over."""
        has_changed = True
        while has_changed:
            has_changed = False
            for queue in queues.values():
                if not queue:
                    continue
                op = self.ops[queue[0]]
                if op.what != "wait":
                    op.start = min(op.start, now)
                elif self.ops[op.waits_for].end <= now:
                    op.start = op.end = now
                    queue.pop(0)
                    has_changed = True

    @property
    def collectives(self):
        return [op for op in self.ops if op.what not in ("compute", "wait")]

    def kineto(self, **sizes):
        """The step that has run, as PyTorch's profiler tells it."""
        step = Step()
        names = {
            "all_gather": ("AllGather_RING_LL", "_allgather_base"),
            "reduce_scatter": ("ReduceScatter_Sum_bf16_RING_LL", "_reduce_scatter_base"),
            "all_reduce": ("AllReduce_Sum_bf16_RING_LL", "allreduce"),
        }
        for op in self.ops:
            step.correlation += 1  # the event that is recorded behind the op before
            if op.what == "compute":
                step.compute(op.start, op.end - op.start, op.stream)
            elif op.what == "wait":
                step.wait(op.stream, self.ops[op.waits_for].stream, 2 * op.waits_for + 3)
            else:
                kernel, name = names[op.what]
                step.nccl(kernel, op.start, op.end - op.start, op=name, stream=op.stream, **sizes)
        return step


def sharded_step(num_layers=4, forward=150.0, backward=300.0, copy=10.0):
    """A step as FSDP2 launches it: gathers prefetched, copied out before use, gradients scattered behind."""
    program = Program()
    gathers, copied = {}, {}
    program.compute(5.0)

    def gather(layer, after):
        for stream in (COPY, COMM):
            if after is not None:
                program.wait(stream, after)
        taken = program.compute(copy, COPY)
        program.wait(COMM, taken)
        gathers[layer] = program.collective("all_gather")

    def copy_out(layer):
        program.wait(COMPUTE, gathers[layer])
        copied[layer] = program.compute(copy)

    last = None
    for layer in range(num_layers):
        gather(layer, last)
        last = copied.get(layer - 1)
        copy_out(layer)
        program.compute(forward)
    before = None
    for layer in reversed(range(num_layers)):
        if layer > 0:
            gather(layer - 1, copied[layer])
        computed = program.compute(backward)
        program.wait(SCATTER, computed)
        if before is not None:
            program.wait(COMPUTE, before)
        before = program.collective("reduce_scatter", SCATTER)
        if layer > 0:
            copy_out(layer - 1)
    program.wait(COMPUTE, before)
    program.compute(400.0)  # the optimizer
    return program
