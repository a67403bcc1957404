"""All-to-alls of unequal parts on some rank: no rank may cut their rows, not even one whose parts happen to be equal.

Pieces of an exchange must be alike on all ranks. A rank sees its own parts only, so ranks tell each other before one of
them plans for all.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import torch
from torch import fx

from lagom_overlap.engines.fx.nodes import collective_of, op_name
from lagom_overlap.workload import Gather, Iteration
from lagom_overlap.workload.sharding import ShardSpec

EXCHANGE: Final = torch.ops._c10d_functional.all_to_all_single.default


def uneven_exchanges(graph: fx.Graph) -> list[str]:
    """Names of the exchanges whose parts are unequal on this rank."""
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
