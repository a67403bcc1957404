"""Replace a collective by others that together do the same (Centauri, tree level 1)."""

from math import prod

import torch
from torch import fx

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.fx.groups import Groups
from lagom_overlap.engines.fx.nodes import Editor, FxCollective, collective_of, op_name, replace, value_of
from lagom_overlap.errors import JobError
from lagom_overlap.workload.rewrite.steps import Substitute, Substitution

_FITS = {
    Substitution.REDUCE_SCATTER_ALL_GATHER: CollectiveKind.ALL_REDUCE,
    Substitution.REDUCES: CollectiveKind.REDUCE_SCATTER,
    Substitution.BROADCASTS: CollectiveKind.ALL_GATHER,
}


def substitute(graph: fx.Graph, node: fx.Node, step: Substitute, groups: Groups) -> None:
    """Applies the step to the collective `node`.

    Raises:
        JobError: if a collective of its kind cannot be replaced so.
    """
    what = collective_of(node)
    if what.kind is not _FITS[step.into]:
        raise JobError(f"{step.comm!r} is a {what.kind}: {step.into} replaces a {_FITS[step.into]}")
    editor = Editor(graph)
    num_ranks = len(groups.ranks(what.group))
    match step.into:
        case Substitution.REDUCE_SCATTER_ALL_GATHER:
            result = _scatter_and_gather(editor, node, what, num_ranks)
        case Substitution.REDUCES:
            result = _reduces(editor, node, what, num_ranks, groups.position(what.group))
        case Substitution.BROADCASTS:
            result = _broadcasts(editor, node, what, num_ranks)
    replace(node, result)


def _scatter_and_gather(editor: Editor, node: fx.Node, what: FxCollective, num_ranks: int) -> fx.Node:
    """All-reduce as reduce-scatter and all-gather of the flat tensor, padded to a multiple of the ranks."""
    shape = list(value_of(what.source).shape)
    num_elements = prod(shape)
    flat = editor.reshape(what.source, [num_elements])
    if missing := -num_elements % num_ranks:
        flat = editor.call(torch.ops.aten.constant_pad_nd.default, flat, [0, missing], 0)
    scatter = FxCollective(CollectiveKind.REDUCE_SCATTER, flat, what.group, what.reduce_op)
    gather = FxCollective(CollectiveKind.ALL_GATHER, flat, what.group)
    part = editor.collective(scatter, flat, num_ranks, name=f"{op_name(node)}.rs")
    whole = editor.collective(gather, part, num_ranks, name=f"{op_name(node)}.ag")
    if missing:
        whole = editor.narrow(whole, 0, 0, num_elements)
    return editor.reshape(whole, shape)


def _reduces(editor: Editor, node: fx.Node, what: FxCollective, num_ranks: int, position: int) -> fx.Node:
    """Reduce-scatter as one reduce to each rank; this rank keeps the one that came to it."""
    part = value_of(what.source).shape[0] // num_ranks
    reduced = [
        editor.reduce(
            editor.narrow(what.source, 0, root * part, part),
            what.reduce_op or "sum",
            root,
            what.group,
            name=f"{op_name(node)}.{root}",
        )
        for root in range(num_ranks)
    ]
    return reduced[position]


def _broadcasts(editor: Editor, node: fx.Node, what: FxCollective, num_ranks: int) -> fx.Node:
    """All-gather as one broadcast from each rank."""
    return editor.concatenated(
        (editor.broadcast(what.source, root, what.group, name=f"{op_name(node)}.{root}") for root in range(num_ranks)),
        0,
    )
