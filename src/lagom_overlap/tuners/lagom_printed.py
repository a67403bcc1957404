"""Algorithms 1 and 2 of the Lagom paper (arXiv 2602.20656v1, section 3.4) as printed, and where they do not run.

    1  S' <- {}                                     a configuration per collective, all at the input
    2  all H <- 0.01                                INITIAL_METRIC
    3  while some s in S is not done
    4    s_j <- argmin over i in M, not done, of H_i
    5    s'_j <- Algorithm 2: minimal NC, NT, C the first time; measured as it stands;
           x' - x > 0 or X' < Y'  ->  s'_j is done
           else lr = (x' - x) / x';  NC, NT, C <- NC + lr, NT + lr, C + lr
    6    s'_j done ->  S' gets s_j;  else H_j <- (Y' - Y) / (x' - x)

Read so where the print leaves no choice: `s.done` of line 3 and `s'.done` of line 6 are one flag, or no input ends; S
is what was given, the default, since no line replaces s_j, so x and Y are those of the default; M is the number of
computations (section 3.1), and H of a computation without a collective does not exist. NC, NT and C are real numbers;
what runs is the nearest allowed setting.

What follows. The first probe ends a collective where its minimum is slower than the default or communication is hidden;
line 7 then appends s_j, the default, so a run that ends returns its input. Otherwise lr is negative or 0, which leads
below the minimum: the same setting again, for ever. A collective beyond the M-th is never chosen. `PrintedEnd.stopped`
says which; the search then stands by its input.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

from lagom_overlap.collective import CommConfig, Subspace
from lagom_overlap.tuners.groupwise import Probe
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Outcome

INITIAL_METRIC: Final = 0.01
"""H of a collective that was not probed."""


@dataclass(frozen=True, slots=True)
class PrintedEnd:
    """What the algorithms return; `stopped` says why they do not end on this input, None where they do."""

    assignment: Assignment
    stopped: str | None = None


def _nearest(axis: tuple[int | None, ...], wanted: float) -> int:
    """The place of the nearest value, the lower of two."""
    distances = [abs((value or 0) - wanted) for value in axis]
    return distances.index(min(distances))


@dataclass(slots=True)
class _State:
    """s'_j: real-valued channels, threads and chunk in one subspace; what runs is the nearest allowed setting."""

    subspace: Subspace
    values: tuple[float, float, float]

    @classmethod
    def minimal(cls, subspace: Subspace) -> "_State":
        channels, threads, chunks = subspace.num_channels, subspace.num_threads, subspace.chunk_bytes
        return cls(subspace, (float(channels[0] or 0), float(threads[0] or 0), float(chunks[0] or 0)))

    @property
    def config(self) -> CommConfig:
        places = [_nearest(axis, value) for axis, value in zip(self.subspace.axes, self.values, strict=True)]
        return self.subspace.at((places[0], places[1], places[2]))

    def add(self, step: float) -> None:
        channels, threads, chunk = self.values
        self.values = (channels + step, threads + step, chunk + step)


def printed(problem: GroupProblem) -> Generator[Probe, Outcome, PrintedEnd]:
    """Runs the two algorithms on a group, the default measured first for x and Y of the input."""
    names, default = problem.group.comm_names, problem.default
    before = yield Probe(assignment=default, reason="the input set S: x and Y of Eq. 7")
    if isinstance(before, Failure):
        return PrintedEnd(default, "the input itself cannot run, so x and Y of Eq. 7 do not exist")
    num = min(len(names), len(problem.group.computations))
    states: list[_State | None] = [None] * len(names)
    metrics, done = [INITIAL_METRIC] * len(names), [False] * len(names)
    while not all(done):
        open_ = [j for j in range(num) if not done[j]]
        if not open_:
            rest = ", ".join(names[num:])
            return PrintedEnd(default, f"argmin over the M = {num} computations never chooses {rest}")
        j = min(open_, key=lambda index: (metrics[index], index))
        state = states[j] = states[j] or _State.minimal(problem.spaces[j].subspace_of(default[j]))
        config = state.config
        outcome = yield Probe(
            assignment=(*default[:j], config, *default[j + 1 :]),
            reason=f"{names[j]}: as printed, H = {metrics[j]:.3g}",
            incumbent=default,
            priorities=dict(zip(names, metrics, strict=True)),
        )
        if isinstance(outcome, Failure):
            # Given up after a reading: the paper gives nothing up, and line 5 judges what was read.
            if outcome.measured is None:
                return PrintedEnd(default, f"{names[j]}: Algorithm 2 has no line for a setting that cannot run")
            outcome = outcome.measured
        change_s = outcome.comm_s[j] - before.comm_s[j]
        if change_s > 0 or outcome.total_comm_s < outcome.comp_s:
            done[j] = True
            continue
        if change_s == 0:
            return PrintedEnd(default, f"{names[j]}: x' = x, so lr is 0 and Eq. 7 divides by 0")
        step = change_s / outcome.comm_s[j]
        metrics[j] = (outcome.comp_s - before.comp_s) / change_s
        state.add(step)
        if state.config == config:
            return PrintedEnd(
                default, f"{names[j]}: lr = {step:.3g} is negative where communication improves: the same setting again"
            )
    return PrintedEnd(default)
