"""Ways to cut a communication, and what each leaves uncovered (Concerto, section 4.5; spec, planners 1.6 and 1.7).

A strategy is a shard axis, a direction (chains before, after, both) and a number of chunks N in {2, 4, 8}, or not to
cut (N = 1), which leaves the whole time T_C uncovered.

`CostMode.PAPER`, with a the slowdown of computation under communication (1.2 from measured 18.2, 21.9 and 23.8 %):

    c1 = T_C - a (N-1)/N (T_pre + T_post),  c2 = T_C/N - a (N-1)/N T_pre,  c3 = T_C/N - a (N-1)/N T_post
    cost = max(c1, c2, c3, 0) + overhead

overhead is what the pieces take beyond the whole operators, with the copies that join them: a summand. Stretched
computation covers more communication, and nobody pays for the stretch.

`CostMode.SLIDES` is what a talk on the paper prints, max(uncovered communication, split overhead, 0): overhead is free
as long as more than it stays uncovered.

`CostMode.SIMULATED` runs the pieces on two streams, computations at 1/slowdown of their rate while a piece of the
communication runs, and takes the makespan less the whole computations; pieces of the communication take what the times
say of that many bytes, latency included.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Final

from lagom_overlap.planners.base import OpTimes
from lagom_overlap.planners.context import context_of, divisible
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import CommOp, CompOp, Gather, Op
from lagom_overlap.workload.rewrite.pieces import joined, piece
from lagom_overlap.workload.rewrite.steps import ChainLink, Split

PAPER_SLOWDOWN: Final = 1.2
"""By how much a computation stretches next to a collective, in the paper's cost model."""
CHUNKS: Final = (2, 4, 8)
"""Pieces that a critical collective may be cut into."""

Slowdown = Callable[[Op, CommOp], float]
"""(computation, communication) -> by how much the former stretches during the latter; at least 1."""


def constant_slowdown(_: Op, __: CommOp) -> float:
    """The paper's constant."""
    return PAPER_SLOWDOWN


class CostMode(StrEnum):
    """How a strategy is priced: equation 5, the talk's reading of it, or two streams simulated."""

    PAPER = "paper"
    SLIDES = "slides"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class ConcertoStrategy:
    """A way to cut a communication; `cost_s` is what it leaves uncovered, overhead included."""

    comm: str
    num_chunks: int
    cost_s: float
    axis: int = 0
    before: tuple[ChainLink, ...] = ()
    after: tuple[ChainLink, ...] = ()

    @property
    def rewrite(self) -> Split | None:
        """The split; None if it is not cut."""
        return Split(self.comm, self.axis, self.num_chunks, self.before, self.after) if self.num_chunks > 1 else None

    @property
    def axes(self) -> dict[str, int]:
        """The computations that it cuts, with their axes."""
        return {link.op: link.axis for link in (*self.before, *self.after)}


def uncovered_s(comm_s: float, before_s: float, after_s: float, num_chunks: int, slowdown: float) -> float:
    """max(c1, c2, c3): communication left uncovered (s), below 0 where there is computation to spare."""
    covered = slowdown * (num_chunks - 1) / num_chunks
    whole = comm_s - covered * (before_s + after_s)
    first, last = comm_s / num_chunks - covered * before_s, comm_s / num_chunks - covered * after_s
    return max(whole, first, last)


def paper_cost(uncovered: float, overhead_s: float) -> float:
    """Equation 5 (s): overhead comes on top."""
    return max(uncovered, 0.0) + max(overhead_s, 0.0)


def slides_cost(uncovered: float, overhead_s: float) -> float:
    """The talk's cost (s): the larger of the two."""
    return max(uncovered, overhead_s, 0.0)


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """Seconds of one piece of the chain before, of the communication, of the chain after; slowdowns of the chains."""

    before_s: float
    comm_s: float
    after_s: float
    before_slowdown: float = 1.0
    after_slowdown: float = 1.0


def simulated_makespan(times: ChunkTimes, num_chunks: int) -> float:
    """Two streams: pieces before, then pieces after on one, pieces of the communication on the other."""
    comp = [(times.before_s, times.before_slowdown)] * num_chunks + [(times.after_s, times.after_slowdown)] * num_chunks
    done_comp = done_comm = 0
    left_comp, left_comm = comp[0][0], times.comm_s
    now = 0.0
    while done_comp < len(comp) or done_comm < num_chunks:
        comm_runs = done_comm < num_chunks and done_comp > done_comm
        comp_runs = done_comp < len(comp) and (done_comp < num_chunks or done_comm > done_comp - num_chunks)
        rate = 1.0 / comp[done_comp][1] if comp_runs and comm_runs else 1.0
        step = min(left_comp / rate if comp_runs else float("inf"), left_comm if comm_runs else float("inf"))
        now += step
        if comm_runs:
            left_comm -= step
        if comp_runs:
            left_comp -= step * rate
        if comp_runs and left_comp <= 1e-15:
            done_comp += 1
            left_comp = comp[done_comp][0] if done_comp < len(comp) else 0.0
        if comm_runs and left_comm <= 1e-15:
            done_comm += 1
            left_comm = times.comm_s
    return now


class Pricing:
    """Prices strategies under the times of a problem."""

    def __init__(
        self, index: StepIndex, times: OpTimes, mode: CostMode, slowdown: Slowdown = constant_slowdown
    ) -> None:
        self._index, self._times, self._mode, self._slowdown = index, times, mode, slowdown
        self._known: dict[object, float] = {}

    def strategies(self, comm: CommOp) -> list[ConcertoStrategy]:
        """All ways to cut a communication, not to cut it first."""
        whole_s = self._times.seconds(comm)
        allowed = [ConcertoStrategy(comm.name, 1, whole_s)]
        if comm.shards is None:
            return allowed
        for axis, combine in enumerate(comm.shards.combine):
            if not isinstance(combine, Gather):
                continue
            context = context_of(self._index, comm, axis, self._times.seconds, 2 * whole_s)
            for num_chunks in CHUNKS:
                if comm.shards.sizes[axis] % num_chunks:
                    continue
                before = divisible(self._index, context.before, num_chunks, from_end=True)
                after = divisible(self._index, context.after, num_chunks, from_end=False)
                for ahead, behind in dict.fromkeys(((before, ()), ((), after), (before, after))):
                    if ahead or behind:
                        key = self._alike(comm, axis, num_chunks, ahead, behind)
                        if key not in self._known:
                            self._known[key] = self._cost(comm, axis, num_chunks, ahead, behind)
                        cost = self._known[key]
                        allowed.append(ConcertoStrategy(comm.name, num_chunks, cost, axis, ahead, behind))
        return sorted(allowed, key=lambda s: (s.num_chunks > 1, s.axis, s.num_chunks, len(s.before), len(s.after)))

    def _alike(
        self, comm: CommOp, axis: int, num_chunks: int, before: Sequence[ChainLink], after: Sequence[ChainLink]
    ) -> object:
        """Equal for strategies of like layers, which cost the same."""
        chains = tuple(
            (link.axis, self._times.seconds(op), op.work, len(self._index.followers[link.op]))
            for link in (*before, *after)
            if isinstance(op := self._index.ops[link.op], CompOp)
        )
        return comm.collective, self._times.seconds(comm), axis, num_chunks, len(before), chains

    def _cost(
        self, comm: CommOp, axis: int, num_chunks: int, before: Sequence[ChainLink], after: Sequence[ChainLink]
    ) -> float:
        seconds = self._times.seconds
        members = dict.fromkeys((comm.name, *(link.op for link in (*before, *after))))
        before_s, after_s = (sum(seconds(self._index.ops[link.op]) for link in links) for links in (before, after))
        joins = sum(self._join_s(name, members) for name in members)
        before_piece, after_piece = (
            sum(self._piece_s(self._index.ops[link.op], link.axis, num_chunks) for link in links)
            for links in (before, after)
        )
        if self._mode is not CostMode.SIMULATED:
            overhead = num_chunks * (before_piece + after_piece) - before_s - after_s + joins
            slow = self._slowdown(self._index.ops[(*before, *after)[0].op], comm)
            uncovered = uncovered_s(seconds(comm), before_s, after_s, num_chunks, slow)
            closed_form = paper_cost if self._mode is CostMode.PAPER else slides_cost
            return closed_form(uncovered, overhead)
        chunks = ChunkTimes(
            before_piece,
            self._piece_s(comm, axis, num_chunks),
            after_piece,
            self._stretch(before, comm),
            self._stretch(after, comm),
        )
        return simulated_makespan(chunks, num_chunks) + joins - before_s - after_s

    def _piece_s(self, op: Op, axis: int, num_chunks: int) -> float:
        return self._times.seconds(piece(op, axis, (Fraction(0), Fraction(1, num_chunks))))

    def _stretch(self, links: Sequence[ChainLink], comm: CommOp) -> float:
        """The slowdown of a chain, by the time of its operators."""
        ops = [self._index.ops[link.op] for link in links]
        whole = sum(self._times.seconds(op) for op in ops)
        return sum(self._times.seconds(op) * self._slowdown(op, comm) for op in ops) / whole if whole else 1.0

    def _join_s(self, name: str, members: Container[str]) -> float:
        """The copy of a member's result where others need it whole."""
        if all(follower in members for follower in self._index.followers[name]):
            return 0.0
        op = self._index.ops[name]
        stream = op.stream if isinstance(op, CompOp) else "compute"
        return self._times.seconds(joined(op, (), stream))
