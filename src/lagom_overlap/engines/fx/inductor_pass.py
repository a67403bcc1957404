"""A plan as a pass of Inductor, after gradients: `torch._inductor.config.post_grad_custom_post_pass`.

Under `torch.compile` functional collectives are nodes of the graph that the pass is given; it captures the graph,
has it planned, applies the rewrites in place and hands it on to be compiled. Rank 0 plans and the others apply what it
found: planners are given time, so two of them may end with two plans. Every rank must compile the same graphs in the
same order, as `torch.compile` itself requires. Graphs of open sizes (`dynamic=True`) are left as they are.

Inductor lowers nodes in the order of the graph; what it fuses may move to its consumer, collectives and waits never
do. Its scheduler then looks for an order that needs less memory (`reorder_for_peak_memory`, on by default), and that
undoes a plan: with PyTorch 2.13 every collective of a planned ZeRO step came out awaited on the spot. Turn it off, and
what else moves them (`order_settings`).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, Protocol, cast

import msgspec
import torch
from torch import distributed as dist
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed import distributed_c10d

from lagom_overlap.capturing.fx import capture_graph
from lagom_overlap.engines.fx.agreement import check_able, check_agreement, signature
from lagom_overlap.engines.fx.apply import rewrite_graph
from lagom_overlap.engines.fx.graph_times import has_fixed_shapes, times_alone
from lagom_overlap.engines.fx.nodes import collective_of, is_collective, op_name
from lagom_overlap.engines.fx.order_settings import undoing
from lagom_overlap.engines.fx.process_groups import ProcessGroups
from lagom_overlap.engines.fx.program import one_tensor_each
from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.workload import Gather, Iteration
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.rewrite.steps import Rewrite, Slide
from lagom_overlap.workload.rewrite.tables import RewriteTable, rewrite_of, table_of
from lagom_overlap.workload.sharding import ShardSpec

_PASSES = count()
_log = logging.getLogger(__name__)


class Decide(Protocol):
    """A planner as the pass sees it; called on rank 0 alone."""

    def __call__(self, capture: IssuedStep, times_s: Mapping[str, float]) -> Sequence[Rewrite]:
        """The rewrites of a captured graph; `times_s` are its operators' times alone, those that were measured."""


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """One graph that the pass has seen: its capture, and what was done to it."""

    capture: IssuedStep
    rewrites: tuple[Rewrite, ...]
    order_digest: str


class _Answer(msgspec.Struct, frozen=True):
    """What rank 0 found for all ranks: rewrites, or why there are none."""

    rewrites: tuple[RewriteTable, ...] = ()
    refused: str = ""


@dataclass(frozen=True, slots=True)
class _HasGraph:
    """What a capture needs of a module; a real one would take the graph away from Inductor's."""

    graph: fx.Graph


_NOTHING_TO_ORDER: Final = (
    "it is not planned. Under FSDP2 around compiled blocks this holds for every graph: gathers and scatters run in "
    "hooks outside of them. Use apply_fsdp2 there, or compile a step with functional collectives (SimpleFSDP, DTensor)"
)


class PlanPass(CustomGraphPass):
    """Plans every graph that holds collectives; the default process group must be open."""

    def __init__(self, decide: Decide, *, measure: bool = False) -> None:
        """Makes the pass; with `measure` all ranks time each operator of a graph alone before it is planned."""
        self._decide = decide
        self._measure = measure
        self._groups = ProcessGroups()
        self._name = f"lagom/pass/{next(_PASSES)}"
        self._number = count()
        self.seen: list[PlannedGraph] = []
        self._has_warned = False

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites the graph in place.

        Raises:
            JobError: on all ranks, if the plan does not fit the graph of one, or there is none.
            BackendError: if the ranks' graphs differ.
        """
        if not any(is_collective(node) for node in graph.nodes):
            if not self.seen and not self._has_warned:
                self._has_warned = True
                _log.warning("a compiled graph without collectives: %s", _NOTHING_TO_ORDER)
            return
        if not has_fixed_shapes(graph):
            _log.warning("a graph with collectives is not planned: its sizes are open; compile with dynamic=False")
            return
        for name in undoing(config):
            _log.warning("torch._inductor.config.%s is on: it undoes the order of the plan", name)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        store = distributed_c10d._get_default_store()
        step = f"{self._name}/{next(self._number)}"
        one_tensor_each(graph)
        capture = capture_graph(cast("fx.GraphModule", _HasGraph(graph)), num_ranks=num_ranks, name=step)
        times_s = self._times_s(graph, capture, step)
        store.set(f"{step}/uneven/{rank}", msgspec.json.encode(uneven_exchanges(graph)).decode())
        if rank == 0:
            store.set(f"{step}/plan", self._decided(self._for_all_ranks(capture, step), times_s))
        answer = msgspec.json.decode(store.get(f"{step}/plan"), type=_Answer)
        if answer.refused:
            raise JobError(answer.refused if rank == 0 else f"rank 0: {answer.refused}")
        rewrites = tuple(rewrite_of(table) for table in answer.rewrites)
        refused = ""
        try:
            if any(isinstance(step, Slide) for step in rewrites):
                raise JobError("a compiler knows no inputs to compare between ranks: nothing can slide in its graphs")
            rewrite_graph(graph, capture.iteration, rewrites, self._groups)
        except LagomError as error:
            refused = str(error)
        check_able(refused, store, rank=rank, num_ranks=num_ranks, step=step)
        lines = signature(graph, self._groups.ranks)
        digest = check_agreement(lines, store, rank=rank, num_ranks=num_ranks, step=step)
        self.seen.append(PlannedGraph(capture, rewrites, digest))

    def _decided(self, capture: IssuedStep, times_s: Mapping[str, float]) -> str:
        """What rank 0 tells the others: the rewrites, or why there are none, so that they do not wait for ever."""
        try:
            answer = _Answer(tuple(table_of(rewrite) for rewrite in self._decide(capture, times_s)))
        except LagomError as error:
            answer = _Answer(refused=str(error))
        return msgspec.json.encode(answer).decode()

    def _for_all_ranks(self, capture: IssuedStep, step: str) -> IssuedStep:
        """Rank 0's capture, without the rows of exchanges that are unequal on some rank."""
        store = distributed_c10d._get_default_store()
        every = [store.get(f"{step}/uneven/{rank}") for rank in range(dist.get_world_size())]
        named = {name for names in every for name in msgspec.json.decode(names, type=list[str])}
        return replace(capture, iteration=without_rows(capture.iteration, named))

    def _times_s(self, graph: fx.Graph, capture: IssuedStep, step: str) -> Mapping[str, float]:
        """On rank 0 the slowest rank's times, of what every rank could time; nothing on the others."""
        if not self._measure:
            return {}
        store = distributed_c10d._get_default_store()
        mine = times_alone(graph, capture.iteration)
        store.set(f"{step}/times/{dist.get_rank()}", msgspec.json.encode(mine).decode())
        if dist.get_rank() != 0:
            return {}
        ranks = range(dist.get_world_size())
        every = [msgspec.json.decode(store.get(f"{step}/times/{rank}"), type=dict[str, float]) for rank in ranks]
        return {name: max(times[name] for times in every) for name in mine if all(name in times for times in every)}

    def uuid(self) -> None:
        """None: what the pass does depends on more than the graph, so compiled graphs are not cached."""
        return


EXCHANGE: Final = torch.ops._c10d_functional.all_to_all_single.default


def uneven_exchanges(graph: fx.Graph) -> list[str]:
    """Names of the exchanges whose parts are unequal on this rank.

    Pieces of an exchange must be alike on all ranks: no rank may cut its rows, not even one whose parts happen to be
    equal. A rank sees its own parts only, so ranks tell each other before one of them plans for all.
    """
    exchanges = [node for node in graph.nodes if node.target is EXCHANGE]
    return [op_name(node) for node in exchanges if collective_of(node).uneven is not None]


def without_rows(iteration: Iteration, exchanges: Iterable[str]) -> Iteration:
    """The iteration with these exchanges cut along their other dimensions at most."""
    named = frozenset(exchanges)
    return replace(
        iteration,
        ops=tuple(
            replace(op, shards=_without_rows(op.shards)) if op.name in named and op.shards is not None else op
            for op in iteration.ops
        ),
    )


def _without_rows(shards: ShardSpec) -> ShardSpec | None:
    """Rows are the last axis, so that the others keep their numbers (`capturing.shard_rules`)."""
    last = len(shards.combine) - 1
    if shards.combine[last] != Gather(0):
        return shards
    if not last:
        return None
    uses = [replace(use, axes=tuple(None if axis == last else axis for axis in use.axes)) for use in shards.inputs]
    return ShardSpec(tuple(uses), shards.combine[:last], shards.sizes[:last])
