from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.concerto.fusion import FusionLimits, fused
from lagom_overlap.planners.concerto.planner import Independence, critical_communications
from lagom_overlap.planners.concerto.strategies import (
    ChunkTimes,
    ConcertoStrategy,
    CostMode,
    Pricing,
    paper_cost,
    simulated_makespan,
    slides_cost,
    uncovered_s,
)
from lagom_overlap.planners.concerto.strategy_choice import choose, interaction_s, without_overlap
from lagom_overlap.planners.context import context_of
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.schedule.graph import TaskGraph
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import CommOp, CompOp, Gather, Iteration, MemoryBound, Op, ShardSpec, TensorUse
from lagom_overlap.workload.rewrite.steps import ChainLink, Fuse


@dataclass(frozen=True)
class Named:
    """Seconds by name; pieces take their share and `launch_s`."""

    known: dict[str, float]
    launch_s: float = 0.0

    def seconds(self, op: Op) -> float:
        return self.known.get(op.name, 1e-3) + self.launch_s


def _graph(tasks: list[tuple[str, int, int, list[int]]]) -> TaskGraph:
    """(name, ticks, 0 computes or 1 communicates, predecessors)."""
    return TaskGraph(
        names=tuple(t[0] for t in tasks),
        ticks=tuple(t[1] for t in tasks),
        resource=tuple(t[2] for t in tasks),
        preds=tuple(tuple(t[3]) for t in tasks),
        resources=("compute", "link"),
        tick_s=1e-6,
    )


@pytest.mark.parametrize(("comm_ticks", "critical"), [(4, False), (5, True), (9, True)])
def test_figure_7_a_communication_is_critical_if_what_is_independent_is_shorter(
    comm_ticks: int, critical: bool
) -> None:
    """Fig. 7: A before D before B; C and E compute, F communicates meanwhile: T_C + T_E - T_F < T_D."""
    tasks = [("A", 2, 0, []), ("D", comm_ticks, 1, [0]), ("B", 2, 0, [1])]
    tasks += [("C", 3, 0, []), ("E", 4, 0, []), ("F", 3, 1, [])]
    found = critical_communications(_graph(tasks), Independence.PRINTED)
    assert (1 in found) is critical


def test_over_a_whole_step_nothing_is_critical_as_printed() -> None:
    """A later micro-batch is independent of the first one's collectives: the printed set hides everything."""
    tasks: list[tuple[str, int, int, list[int]]] = []
    last = []
    for _ in range(4):
        start = len(tasks)
        tasks += [("x", 10, 0, last), ("c", 10, 1, [start]), ("y", 10, 0, [start + 1])]
        last = [start + 2]
    chained = _graph(tasks)
    assert critical_communications(chained, Independence.PRINTED) == {1, 4, 7, 10}
    free = _graph(
        [
            (name, ticks, kind, [p for p in preds if p // 3 == n // 3])
            for n, (name, ticks, kind, preds) in enumerate(tasks)
        ]
    )
    assert critical_communications(free, Independence.PRINTED) == frozenset()


@pytest.mark.parametrize(
    ("comm", "before", "after", "chunks", "cost"),
    [
        (10.0, 4.0, 4.0, 2, 5.2),  # c1 = 10 - 0.6 * 8, c2 = c3 = 5 - 2.4
        (10.0, 8.0, 0.0, 2, 5.2),  # c1 = 10 - 4.8; c3 = 5
        (10.0, 20.0, 0.0, 4, 2.5),  # c3: the last chunk is behind everything
        (1.0, 9.0, 9.0, 8, 0.0),
    ],
)
def test_equation_5_is_the_worked_numbers(comm: float, before: float, after: float, chunks: int, cost: float) -> None:
    assert paper_cost(uncovered_s(comm, before, after, chunks, 1.2), 0.0) == pytest.approx(cost)


@pytest.mark.parametrize(
    ("uncovered", "overhead", "equation", "talk"),
    [(3.0, 1.0, 4.0, 3.0), (1.0, 3.0, 4.0, 3.0), (-2.0, 0.5, 0.5, 0.5), (-2.0, -1.0, 0.0, 0.0)],
)
def test_overhead_is_a_summand_in_the_paper_and_an_argument_in_the_talk(
    uncovered: float, overhead: float, equation: float, talk: float
) -> None:
    """max(uncovered, 0) + overhead against max(uncovered, overhead, 0), which is never the larger of the two."""
    assert (paper_cost(uncovered, overhead), slides_cost(uncovered, overhead)) == (equation, talk)
    assert talk <= equation


@given(before=st.floats(0.1, 5), comm=st.floats(0.1, 5), after=st.floats(0.1, 5), chunks=st.sampled_from((2, 4, 8)))
@settings(max_examples=60, deadline=None)
def test_chunks_on_two_streams_are_the_recurrence(before: float, comm: float, after: float, chunks: int) -> None:
    """Without slowdown: comm_k >= max(before_k, comm_k-1), after_k >= max(comm_k, after_k-1, all of before)."""
    sent = 0.0
    done = chunks * before
    for k in range(chunks):
        sent = max((k + 1) * before, sent) + comm
        done = max(sent, done) + after
    assert simulated_makespan(ChunkTimes(before, comm, after), chunks) == pytest.approx(done)


def test_a_slowed_chain_takes_longer_only_while_it_communicates() -> None:
    """Two pieces of 1 s each. After at half rate: 2..3 during the wire does half of the first, 3..4.5 the rest."""
    assert simulated_makespan(ChunkTimes(1.0, 1.0, 1.0), 2) == 4.0
    assert simulated_makespan(ChunkTimes(1.0, 1.0, 1.0, 1.0, 2.0), 2) == pytest.approx(4.5)
    assert simulated_makespan(ChunkTimes(1.0, 1.0, 1.0, 2.0, 1.0), 2) == pytest.approx(4.5)


def test_a_zero_chain_costs_the_whole_communication() -> None:
    assert simulated_makespan(ChunkTimes(0.0, 1.0, 0.0), 4) == pytest.approx(4.0)


def _rows(*sources: str) -> ShardSpec:
    return ShardSpec(tuple(TensorUse(source, (0, None)) for source in sources), (Gather(0),), (8,))


def _chain_step() -> Iteration:
    """norm - gather - a - b, aside between a and c: c is not convex with a."""
    both = ShardSpec((TensorUse("norm", (0, 1)),), (Gather(0), Gather(1)), (8, 8))
    work = MemoryBound(800)
    call = Collective(CollectiveKind.ALL_GATHER, 800, 2)
    ops: tuple[Op, ...] = (
        CompOp(name="norm", work=work, shards=_rows("")),
        CommOp(name="gather", collective=call, deps=("norm",), shards=both),
        CompOp(name="a", work=work, deps=("gather",), shards=_rows("gather")),
        CompOp(name="b", work=work, deps=("a",), shards=_rows("a")),
        CompOp(name="aside", work=work, deps=("a",)),
        CompOp(name="c", work=work, deps=("b", "aside"), shards=_rows("b", "aside")),
    )
    return Iteration("chain", ops, is_dataflow=True)


def test_a_context_grows_until_it_covers_the_communication() -> None:
    index = StepIndex(_chain_step())
    gather = index.ops["gather"]
    assert isinstance(gather, CommOp)
    times = Named({"a": 1.0, "b": 1.0})
    whole = context_of(index, gather, 0, times.seconds, 9.0)
    assert (whole.before, whole.after) == ((ChainLink("norm", 0),), (ChainLink("a", 0), ChainLink("b", 0)))
    assert context_of(index, gather, 0, times.seconds, 0.5).after == (ChainLink("a", 0),)


def test_a_context_stops_where_shard_axes_do_not_meet() -> None:
    """Along the columns: a reads them whole."""
    index = StepIndex(_chain_step())
    gather = index.ops["gather"]
    assert isinstance(gather, CommOp)
    found = context_of(index, gather, 1, Named({}).seconds, 9.0)
    assert (found.before, found.after) == ((), ())


def test_overhead_is_added_to_the_cost_not_compared_with_it() -> None:
    """The slides' max(uncovered, overhead, 0) would give the larger of the two."""
    index = StepIndex(_chain_step())
    gather = index.ops["gather"]
    assert isinstance(gather, CommOp)
    known = {"norm": 0.0, "gather": 10.0, "a": 3.0, "b": 3.0}
    pricing = Pricing(index, _Halving(known, launch_s=0.25), CostMode.PAPER)
    cost = next(s.cost_s for s in pricing.strategies(gather) if s.num_chunks == 2 and not s.before)
    # T_C 10.25, T_post 6.5: c1 = 10.25 - 0.6 * 6.5; overhead: 2 ops x 1 more launch, the join of a for aside
    join = 1e-3 + 0.25
    assert cost == pytest.approx(10.25 - 0.6 * 6.5 + 0.5 + 2 * join)


@dataclass(frozen=True)
class _Halving(Named):
    """Pieces of memory-bound operators take their share."""

    def seconds(self, op: Op) -> float:
        share = op.work.num_bytes / 800 if isinstance(op, CompOp) and isinstance(op.work, MemoryBound) else 1.0
        return self.known.get(op.name, 1e-3 / share) * share + self.launch_s


def _strategies(comm: str, own: list[str], shared: list[str], costs: list[float]) -> list[ConcertoStrategy]:
    """Not cut, the own chain, the own chain and the shared one along either axis."""
    found = [ConcertoStrategy(comm, 1, costs[0])]
    found.append(ConcertoStrategy(comm, 2, costs[1], 0, (), tuple(ChainLink(name, 0) for name in own)))
    for axis, cost in zip((0, 1), costs[2:], strict=True):
        found.append(
            ConcertoStrategy(comm, 4, cost, axis, (), tuple(ChainLink(name, axis) for name in (*own, *shared)))
        )
    return found


def test_interaction_is_what_both_count_on() -> None:
    one = ConcertoStrategy("c", 2, 0.0, 0, (), (ChainLink("x", 0), ChainLink("y", 0)))
    same = ConcertoStrategy("d", 4, 0.0, 0, (ChainLink("x", 0),), ())
    other = ConcertoStrategy("d", 4, 0.0, 1, (ChainLink("x", 1),), ())
    seconds = {"x": 8.0, "y": 3.0}
    assert interaction_s(one, same, seconds) == 8.0 * (1 / 2 + 3 / 4 - 1)
    assert interaction_s(one, other, seconds) == 8.0 * (1 / 2)
    assert interaction_s(one, ConcertoStrategy("d", 1, 0.0), seconds) == 0.0


@given(st.lists(st.lists(st.floats(0, 9), min_size=4, max_size=4), min_size=2, max_size=4), st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_choice_is_the_best_of_all_combinations(costs: list[list[float]], ring: bool) -> None:
    """Against enumeration; along a chain of communications and, with CP-SAT, in a ring of them."""
    names = [f"c{n}" for n in range(len(costs))]
    options = {}
    for n, name in enumerate(names):
        shared = [f"x{n}", f"x{n - 1}"] if n else [f"x{n}"]
        if ring and n == 0:
            shared.append(f"x{len(names) - 1}")
        options[name] = _strategies(name, [f"own{n}"], shared, costs[n])
    ops = {link for found in options.values() for s in found for link in s.axes}
    step = Iteration("s", tuple(CompOp(name=name, work=MemoryBound(8)) for name in sorted(ops)), is_dataflow=True)
    seconds = {name: 1.0 + len(name) for name in ops}
    chosen = choose(options, StepIndex(step), Named(seconds), Deadline(3000.0))

    def objective_s(strategies: Sequence[ConcertoStrategy]) -> float:
        pairs = combinations(strategies, 2)
        return sum(s.cost_s for s in strategies) + sum(interaction_s(one, other, seconds) for one, other in pairs)

    best = min(objective_s(combination) for combination in product(*options.values()))
    assert objective_s(list(chosen.values())) == pytest.approx(best, abs=1e-6)


def test_a_computation_is_cut_for_the_cheaper_communication_only() -> None:
    first = ConcertoStrategy("c", 2, 1.0, 0, (), (ChainLink("x", 0), ChainLink("y", 0)))
    second = ConcertoStrategy("d", 4, 2.0, 0, (ChainLink("w", 0), ChainLink("y", 0), ChainLink("z", 0)), ())
    kept = {s.comm: s for s in without_overlap({"c": first, "d": second, "e": ConcertoStrategy("e", 1, 0.0)})}
    assert set(kept) == {"c", "d"}
    assert kept["d"].before == (ChainLink("z", 0),)


def _gathers(between: list[float]) -> PlanProblem:
    """Gathers with computations of this many seconds between them."""
    ops: list[Op] = []
    known: dict[str, float] = {}
    for number, seconds in enumerate([*between, 0.0]):
        call = Collective(CollectiveKind.ALL_GATHER, 1000, 2)
        ops.append(CommOp(name=f"g{number}", collective=call))
        ops.append(CompOp(name=f"x{number}", work=MemoryBound(8), deps=()))
        known[f"g{number}"], known[f"x{number}"] = 1e-3, seconds or 1e-6
    last = tuple(op.name for op in ops)
    ops.append(CompOp(name="end", work=MemoryBound(8), deps=last))
    times = _ByBytes(known)
    return PlanProblem(
        iteration=Iteration("gathers", tuple(ops), is_dataflow=True), cluster=load_preset("a100_dgx"), times=times
    )


@dataclass(frozen=True)
class _ByBytes(Named):
    def seconds(self, op: Op) -> float:
        return 1e-3 + 1e-9 * op.collective.num_bytes if isinstance(op, CommOp) else self.known.get(op.name, 1e-6)


def test_fusion_merges_what_only_auxiliary_work_separates() -> None:
    found = _gathers([5e-6, 5e-6, 1.0, 5e-6])
    steps, iteration = fused(found, found.iteration, found.iteration, FusionLimits(), Deadline(3000.0))
    assert steps == [Fuse(("g0", "g1", "g2")), Fuse(("g3", "g4"))]
    assert [op.name for op in iteration.comms] == ["g0+2", "g3+1"]


def test_fusion_stops_at_its_cap_of_bytes() -> None:
    found = _gathers([1e-6, 1e-6, 1e-6])
    steps, _ = fused(found, found.iteration, found.iteration, FusionLimits(max_bytes=2500), Deadline(3000.0))
    assert steps == [Fuse(("g0", "g1")), Fuse(("g2", "g3"))]


def test_what_an_order_puts_on_one_stream_is_fused_only_if_it_had_one_before() -> None:
    """Rewrites come before the order that moves streams: there a framework's gather and a program's differ."""
    found = _gathers([1e-6, 1e-6])
    ops = [replace(op, stream="all_gather") if op.name == "g1" else op for op in found.iteration.ops]
    plain = replace(found.iteration, ops=tuple(ops))
    steps, _ = fused(found, plain, found.iteration, FusionLimits(), Deadline(3000.0))
    assert steps == [Fuse(("g0", "g2"))]
