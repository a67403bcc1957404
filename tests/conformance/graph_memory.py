"""What a traced graph holds as it runs, by its storages, and what an iteration's buffers predict of it."""

from dataclasses import replace

import torch
from torch import fx

from lagom_overlap.engines.fx.nodes import OP_NAME, op_name
from lagom_overlap.planners.memory import peak_of_order
from lagom_overlap.workload import Iteration

C10D = torch.ops._c10d_functional


def storages(node: fx.Node) -> set[int]:
    found = node.meta.get("val")
    tensors = [one for one in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(one, torch.Tensor)]
    return {one.untyped_storage()._cdata for one in tensors}


def held_in_order(graph: fx.Graph) -> int:
    """The most bytes of the graph's own results held as it runs: each storage from its first node to its last."""
    nodes = list(graph.nodes)
    made_by: dict[int, int] = {}  # a wait hands on what its collective made, the fake tensors of both are two
    held_by: dict[fx.Node, set[int]] = {}
    for node in nodes:
        own = storages(node)
        if node.target is C10D.wait_tensor.default:
            made_by.update(zip(own, held_by[node.args[0]], strict=True))
        held_by[node] = {made_by.get(one, one) for one in own}
    given = {one for node in nodes if node.op == "placeholder" for one in held_by[node]}
    returned = {one for node in nodes if node.op == "output" for used in node.all_input_nodes for one in held_by[used]}
    seen: dict[int, list[int]] = {}
    num_bytes = {}
    for number, node in enumerate(nodes):
        for used in (node, *node.all_input_nodes):
            for one in held_by[used] - given:
                seen.setdefault(one, []).append(number)
                num_bytes[one] = used.meta["val"].untyped_storage().nbytes()
    ends = {one: len(nodes) if one in returned else max(moments) for one, moments in seen.items()}
    return max(
        sum(num_bytes[one] for one, moments in seen.items() if moments[0] <= moment <= ends[one])
        for moment in range(len(nodes))
    )


def predicted_peak(iteration: Iteration, graph: fx.Graph) -> int:
    """By the iteration's buffers, in the graph's order; a join for what the step returns is the graph's alone."""
    place = {op.name: number for number, op in enumerate(iteration.ops)}
    order = [place[op_name(node)] for node in graph.nodes if OP_NAME in node.meta and op_name(node) in place]
    return peak_of_order(replace(iteration, resident_bytes=0), order)
