"""How a tensor is cut into pieces along one dimension, and what a view of it makes of that.

Each index along the dimension belongs to one piece; a piece holds its indices in increasing order. That covers equal
parts, parts of every rank's part (an all-gather cut along the dimension that it gathers) and what the steps of a
hierarchical collective bring. Views between operators are followed by trying them on small integers.
"""

from dataclasses import dataclass, replace
from itertools import groupby
from operator import getitem
from typing import Any, Final

import torch
from torch import fx

from lagom_overlap.engines.fx.nodes import Editor, is_wait, value_of
from lagom_overlap.errors import JobError

_ATEN = torch.ops.aten
_SIZED: Final = (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default)
"""Operators whose second argument is the shape of what they make."""
_FOLLOWED: Final = (
    *_SIZED,
    _ATEN.t.default,
    _ATEN.transpose.int,
    _ATEN.permute.default,
    _ATEN.unsqueeze.default,
    _ATEN.squeeze.dim,
    _ATEN.detach.default,
    _ATEN.alias.default,
    _ATEN.clone.default,
)


@dataclass(frozen=True, slots=True)
class GraphCut:
    """`owner[i]` is the number of the piece that index i along dimension `dim` belongs to."""

    dim: int
    owner: tuple[int, ...]

    @property
    def num_pieces(self) -> int:
        """Pieces, numbered from 0."""
        return max(self.owner) + 1

    def size_of(self, piece: int) -> int:
        """Indices of a piece."""
        return self.owner.count(piece)


def equal_parts(dim: int, length: int, num_pieces: int) -> GraphCut:
    """Contiguous pieces of equal length.

    Raises:
        JobError: if the length is no multiple of their number.
    """
    if length % num_pieces:
        raise JobError(f"a dimension of {length} cannot be cut into {num_pieces} equal pieces")
    return GraphCut(dim, tuple(index * num_pieces // length for index in range(length)))


def repeated(cut: GraphCut, times: int) -> GraphCut:
    """The cut of a dimension that holds `times` parts, each cut alike."""
    return replace(cut, owner=cut.owner * times)


def _runs(cut: GraphCut) -> list[tuple[int, int, int]]:
    """Stretches of one owner: (piece, start, length)."""
    runs, start = [], 0
    for piece, members in groupby(cut.owner):
        length = len(list(members))
        runs.append((piece, start, length))
        start += length
    return runs


def piece_of(editor: Editor, source: fx.Node, cut: GraphCut, piece: int) -> fx.Node:
    """One piece of a tensor: a view where it lies in one stretch, else a copy."""
    parts = [editor.narrow(source, cut.dim, start, length) for owner, start, length in _runs(cut) if owner == piece]
    return parts[0] if len(parts) == 1 else editor.concatenated(parts, cut.dim)


def joined(editor: Editor, pieces: list[fx.Node], cut: GraphCut, *, name: str | None) -> fx.Node:
    """The whole tensor from its pieces."""
    runs = _runs(cut)
    if [piece for piece, _, _ in runs] == list(range(len(pieces))):
        return editor.concatenated(pieces, cut.dim, name=name)
    taken = [0] * len(pieces)
    parts = []
    for piece, _, length in runs:
        parts.append(editor.narrow(pieces[piece], cut.dim, taken[piece], length))
        taken[piece] += length
    return editor.concatenated(parts, cut.dim, name=name)


def is_followed(node: fx.Node) -> bool:
    """Whether a cut can be followed through the node: it puts elements elsewhere and does nothing else."""
    return node.op == "call_function" and (node.target in _FOLLOWED or is_wait(node) or _is_first(node))


def _is_first(node: fx.Node) -> bool:
    """Whether the node takes the first tensor of an operator that makes several."""
    return bool(node.target is getitem and node.args[1] == 0)


def after(node: fx.Node, cut: GraphCut) -> GraphCut:
    """The cut of what a followed node makes, from the cut of what it takes.

    Raises:
        JobError: if the pieces do not lie along one dimension any more.
    """
    if _is_first(node):
        return cut
    return _along_one_dim(node, _move(node, _labels(node.all_input_nodes[0], cut)))


def before(node: fx.Node, cut: GraphCut) -> GraphCut:
    """The cut of what a followed node takes, from the cut of what it makes; raises like `after`."""
    if _is_first(node):
        return cut
    taken = value_of(node.all_input_nodes[0])
    places = _move(node, torch.arange(taken.numel()).reshape(taken.shape))
    labels = torch.empty(taken.numel(), dtype=torch.int16)
    labels[places.reshape(-1)] = _labels(node, cut).reshape(-1)
    return _along_one_dim(node, labels.reshape(taken.shape))


def of_piece(editor: Editor, node: fx.Node, source: fx.Node, made: GraphCut, piece: int) -> fx.Node:
    """The followed node applied to a piece of its input; `made` is the cut of what it makes."""
    if is_wait(node):
        return source  # a piece of a collective is awaited where it is made
    if node.target in _SIZED:
        shape = list(value_of(node).shape)
        shape[made.dim] = made.size_of(piece)
        return editor.reshape(source, shape)
    return editor.call_like(node, (source, *node.args[1:]), node.kwargs, name=None)


def _labels(node: fx.Node, cut: GraphCut) -> torch.Tensor:
    """The piece of each element of the node's tensor."""
    shape = value_of(node).shape
    if len(cut.owner) != shape[cut.dim]:
        raise JobError(f"node {node.name!r} has {shape[cut.dim]} indices along {cut.dim}, the cut {len(cut.owner)}")
    along = [1] * len(shape)
    along[cut.dim] = len(cut.owner)
    return torch.tensor(cut.owner, dtype=torch.int16).reshape(along).expand(shape).contiguous()


def _move(node: fx.Node, values: torch.Tensor) -> torch.Tensor:
    """The followed node on other values of the same shape."""
    if is_wait(node):
        return values
    if node.target in _SIZED:
        return values.reshape(value_of(node).shape)
    moved: Any = node.target(values, *node.args[1:], **node.kwargs)  # type: ignore[operator]  # an operator
    assert isinstance(moved, torch.Tensor)
    return moved


def _along_one_dim(node: fx.Node, labels: torch.Tensor) -> GraphCut:
    for dim in range(labels.dim()):
        lines = labels.movedim(dim, 0).reshape(labels.shape[dim], -1)
        if bool((lines == lines[:, :1]).all()):
            owner = tuple(int(piece) for piece in lines[:, 0])
            if max(owner) > 0:
                return GraphCut(dim, owner)
    raise JobError(f"node {node.name!r} mixes the pieces: they lie along no one dimension of what it makes")
