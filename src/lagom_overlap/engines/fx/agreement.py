"""Agreement of ranks on the collectives of a step, checked before the first of them starts.

Ranks that call collectives of one group in different orders wait for each other for ever or exchange wrong data. A
plan's rewrites give every rank the same order by construction; this check is for what lies before it: another plan
file, another script or another version on one of the ranks, or parts of an exchange that allow less on one of them.
"""

import hashlib
from collections.abc import Callable
from typing import Final, Protocol

import torch
from torch import fx

from lagom_overlap.engines.fx.nodes import is_collective, op_name
from lagom_overlap.engines.fx.reorder import STREAM
from lagom_overlap.engines.fx.slide import replicated_inputs
from lagom_overlap.errors import BackendError, JobError

_SHORT: Final = 16
"""Hex digits of a digest that ranks compare: 64 bits, which no two graphs of a job share by chance."""


class Board(Protocol):
    """Where ranks leave texts for each other; a `torch.distributed.Store` is one."""

    def set(self, key: str, value: str) -> None:
        """Leaves a text."""

    def get(self, key: str) -> bytes:
        """A text that some rank leaves; waits for it."""


def signature(graph: fx.Graph, ranks_of: Callable[[str], tuple[int, ...]]) -> tuple[str, ...]:
    """One line per collective in order: stream, name, operator, size and type of its tensors, ranks in its group.

    Then one per input that is compared before anything runs (`check_replicated`), which takes every rank. Which ranks
    are in a group is left out: each rank has groups of its own.
    """
    lines = []
    for node in graph.nodes:
        if not is_collective(node):
            continue
        group = next(arg for arg in reversed(node.args) if isinstance(arg, str))
        tensors = [used.meta["val"] for used in node.all_input_nodes]
        shapes = " ".join(f"{_common_shape(node, tensor)} {tensor.dtype}" for tensor in tensors)
        stream = node.meta.get(STREAM, "")
        lines.append(f"{stream} {op_name(node)} {node.target} {shapes} over {len(ranks_of(group))}".strip())
    for node, (number, groups) in replicated_inputs(graph).items():
        lines.append(f"compare input {number} ({node.name}) over {' and '.join(map(str, sorted(map(len, groups))))}")
    return tuple(lines)


def _common_shape(node: fx.Node, tensor: torch.Tensor) -> list[int]:
    """The lengths that are alike on all ranks: an all-to-all's rows need not be."""
    return list(
        tensor.shape[1:] if node.target is torch.ops._c10d_functional.all_to_all_single.default else tensor.shape
    )


def check_able(refused: str, board: Board, *, rank: int, num_ranks: int, step: str) -> None:
    """Every rank says why it cannot do its part (`refused`, empty if it can) and learns of the others.

    Raises:
        JobError: on all ranks, if one cannot: none goes on alone to wait for it.
    """
    board.set(f"{step}/refused/{rank}", refused)
    for other in range(num_ranks):
        refusal = board.get(f"{step}/refused/{other}").decode()
        if refusal:
            raise JobError(refused or f"rank {other}: {refusal}")


def check_agreement(lines: tuple[str, ...], board: Board, *, rank: int, num_ranks: int, step: str) -> str:
    """The digest of the order, equal on all ranks; `step` names the check, a new one for each.

    Raises:
        BackendError: if a rank has another order; says where they part.
    """
    text = "\n".join(lines)
    digest = hashlib.sha256(text.encode()).hexdigest()[:_SHORT]
    board.set(f"{step}/digest/{rank}", digest)
    board.set(f"{step}/order/{rank}", text)
    first = board.get(f"{step}/digest/0").decode()
    for other in range(1, num_ranks):
        if board.get(f"{step}/digest/{other}").decode() != first:
            raise BackendError(_difference(board, step, other))
    return digest


def _difference(board: Board, step: str, other: int) -> str:
    mine, theirs = (board.get(f"{step}/order/{rank}").decode().splitlines() for rank in (0, other))
    place = next(
        (number for number, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
    )

    def shown(lines: list[str]) -> str:
        return repr(lines[place]) if place < len(lines) else "none"

    return (
        f"ranks 0 and {other} would run collectives in different orders, which hangs: collective {place} is "
        f"{shown(mine)} on rank 0 and {shown(theirs)} on rank {other}; nothing was run"
    )
