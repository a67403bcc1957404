"""A plan as a pass of Inductor, after gradients: `torch._inductor.config.post_grad_custom_post_pass`.

Under `torch.compile` functional collectives are nodes of the graph that the pass is given; it captures the graph,
has it planned, applies the rewrites in place and hands it on to be compiled. Rank 0 plans and the others apply what it
found: planners are given time, so two of them may end with two plans. Every rank must compile the same graphs in the
same order, as `torch.compile` itself requires.

Inductor lowers nodes in the order of the graph and keeps it, except for what it fuses: an element-wise operator may
move to its consumer. Collectives and waits are never fused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import cast

import msgspec
from torch import distributed as dist
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed import distributed_c10d

from lagom_overlap.capture.base import Capture
from lagom_overlap.capture.fx import capture_graph
from lagom_overlap.engines.planned.agreement import check_agreement, signature
from lagom_overlap.engines.planned.apply import rewrite_graph
from lagom_overlap.engines.planned.groups import ProcessGroups
from lagom_overlap.engines.planned.nodes import is_collective
from lagom_overlap.workload.rewrite.steps import Rewrite
from lagom_overlap.workload.rewrite.tables import RewriteTable, rewrite_of, table_of

Decide = Callable[[Capture], Sequence[Rewrite]]
"""A planner as the pass sees it: the captured graph in, rewrites out; called on rank 0 alone."""

_PASSES = count()


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """One graph that the pass has seen: its capture, and what was done to it."""

    capture: Capture
    rewrites: tuple[Rewrite, ...]
    order_digest: str


@dataclass(frozen=True, slots=True)
class _HasGraph:
    """What a capture needs of a module; a real one would take the graph away from Inductor's."""

    graph: fx.Graph


class PlanPass(CustomGraphPass):
    """Plans every graph that holds collectives; the default process group must be open."""

    def __init__(self, decide: Decide) -> None:
        self._decide = decide
        self._groups = ProcessGroups()
        self._name = f"lagom/pass/{next(_PASSES)}"
        self._number = count()
        self.seen: list[PlannedGraph] = []

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites the graph in place.

        Raises:
            JobError: if the plan does not fit the graph.
            BackendError: if the ranks' graphs differ.
        """
        if not any(is_collective(node) for node in graph.nodes):
            return
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        store = distributed_c10d._get_default_store()
        step = f"{self._name}/{next(self._number)}"
        capture = capture_graph(cast("fx.GraphModule", _HasGraph(graph)), num_ranks=num_ranks, name=step)
        if rank == 0:
            plan = msgspec.json.encode([table_of(rewrite) for rewrite in self._decide(capture)])
            store.set(f"{step}/plan", plan.decode())
        tables = msgspec.json.decode(store.get(f"{step}/plan"), type=list[RewriteTable])
        rewrites = tuple(rewrite_of(table) for table in tables)
        rewrite_graph(graph, capture.iteration, rewrites, self._groups)
        lines = signature(graph, self._groups.ranks)
        digest = check_agreement(lines, store, rank=rank, num_ranks=num_ranks, step=step)
        self.seen.append(PlannedGraph(capture, rewrites, digest))

    def uuid(self) -> None:
        """None: what the pass does depends on more than the graph, so compiled graphs are not cached."""
        return
