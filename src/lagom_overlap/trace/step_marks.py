"""Which steps a trace marks, and the backward passes and optimizer steps in them, by the names of events."""

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Final

from lagom_overlap.trace.chrome_reader import TraceEvent
from lagom_overlap.trace.fields import to_ns
from lagom_overlap.trace.gpu_trace import ProfilerStep
from lagom_overlap.trace.usual_events import CpuEvent, OtherEvent
from lagom_overlap.workload import Phase

STEP_NAME: Final = "ProfilerStep"
_PHASE_OF: Final = {
    "autograd::engine::evaluate_function": Phase.BACKWARD,
    "FSDP::pre_backward": Phase.BACKWARD,
    "FSDP::post_backward": Phase.BACKWARD,
    "FSDP::root_post_backward": Phase.BACKWARD,
    "Optimizer.step": Phase.OPTIMIZER,
}
PHASES: Final = tuple(_PHASE_OF)
_SAME_PASS_NS: Final = 200_000
"""Autograd evaluates one node this soon after another: what the CPU does in between belongs to the backward pass."""
_STEP: Final = re.compile(r"ProfilerStep\s?#\s?(\d+)")
_MAX_DIGITS: Final = 15
"""Of a step's number: what a float64, in which other tools keep it, still tells apart."""


def phase_of(name: str) -> Phase | None:
    """The phase of the step that a CPU event of this name is in; None where its name does not say."""
    return next((phase for prefix, phase in _PHASE_OF.items() if name.startswith(prefix)), None)


@dataclass(slots=True)
class StepMarks:
    """The marks of a file, while its events pass by."""

    gpu_step_ns: list[int] = field(default_factory=list)
    phase_spans: list[tuple[Phase, int, int]] = field(default_factory=list)
    steps: dict[int, list[ProfilerStep]] = field(default_factory=lambda: defaultdict(list))

    def take_gpu_step(self, event: TraceEvent | OtherEvent) -> None:
        """A step as it is marked on the GPU's timeline: HTA takes it for a step of the CPU unless it has a stream."""
        start_ns = to_ns(event.ts)
        if start_ns is not None and (event.args is None or event.args.stream is None):
            self.gpu_step_ns.append(start_ns)

    def take_phase(self, event: TraceEvent | CpuEvent, name: str) -> None:
        """An event of the CPU whose name begins with one of `PHASES`."""
        start_ns, length_ns = to_ns(event.ts), to_ns(event.dur)
        if start_ns is not None and length_ns is not None and length_ns >= 0:
            phase = phase_of(name)
            if phase is not None:
                self.phase_spans.append((phase, start_ns, start_ns + length_ns))

    def phases(self) -> tuple[tuple[Phase, int, int], ...]:
        """The backward passes and optimizer steps, each as one span."""
        passes: list[tuple[Phase, int, int]] = []
        for phase in (Phase.BACKWARD, Phase.OPTIMIZER):
            spans = sorted((start, end) for marked, start, end in self.phase_spans if marked is phase)
            for start, end in spans:
                if passes and passes[-1][0] is phase and start <= passes[-1][2] + _SAME_PASS_NS:
                    passes[-1] = (phase, passes[-1][1], max(end, passes[-1][2]))
                else:
                    passes.append((phase, start, end))
        return tuple(passes)

    def take_step(self, event: TraceEvent | CpuEvent, name: str) -> None:
        """A step that the profiler marks on the CPU."""
        match = _STEP.match(name)
        start_ns, length_ns = to_ns(event.ts), to_ns(event.dur)
        if match is None or start_ns is None or length_ns is None or length_ns < 0 or len(match[1]) > _MAX_DIGITS:
            return
        number = int(match[1])
        self.steps[number].append(ProfilerStep(number=number, start_ns=start_ns, end_ns=start_ns + length_ns))

    def marked_steps(self, *, as_recorded: bool) -> tuple[tuple[ProfilerStep, ...], tuple[str, ...]]:
        """The steps in order of start, and a sentence where several have one number.

        Marks of one number that overlap are one step that several threads name: the first in the file counts. Where
        they follow each other they are several steps, numbered anew in order of time; as recorded, still one. A mark of
        no length, as of a step that the profiler did not see end, is none.
        """
        every = [
            timed
            for marks in self.steps.values()
            if (timed := [mark for mark in marks if as_recorded or mark.end_ns > mark.start_ns])
        ]
        first = [marks[0] for marks in every]
        steps = list(first)
        for marks in [] if as_recorded else every:
            for step in marks[1:]:
                if all(step.start_ns >= other.end_ns or step.end_ns <= other.start_ns for other in steps):
                    steps.append(step)
        steps.sort(key=lambda step: step.start_ns)
        if len(steps) == len(first):
            return tuple(steps), ()
        begin = steps[0].number
        numbered = tuple(replace(step, number=begin + place) for place, step in enumerate(steps))
        return numbered, (f"{len(steps)} steps have only {len(first)} numbers: they are numbered in order of time",)
