"""PyTorch's collective operators: what they move, what they read and write, over which ranks.

c10d's operators (`c10d::`) work on buffers and say so nowhere in their schemas, so their arguments are told apart by
name; functional collectives (`_c10d_functional::`) return new tensors, which `wait_tensor` hands on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName
from torch.utils._pytree import tree_leaves

from lagom_overlap.collective import CollectiveKind

NAMESPACES: Final = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
WAITS: Final = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
"""Operators of these namespaces that only hand a result on."""

_IGNORED: Final = frozenset({"barrier", "monitored_barrier_", "check_for_nan"})

_KINDS: Final = {
    "allgather_": CollectiveKind.ALL_GATHER,
    "_allgather_base_": CollectiveKind.ALL_GATHER,
    "allgather_coalesced_": CollectiveKind.ALL_GATHER,
    "allgather_into_tensor_coalesced_": CollectiveKind.ALL_GATHER,
    "all_gather_into_tensor": CollectiveKind.ALL_GATHER,
    "all_gather_into_tensor_out": CollectiveKind.ALL_GATHER,
    "all_gather_into_tensor_coalesced": CollectiveKind.ALL_GATHER,
    "reduce_scatter_": CollectiveKind.REDUCE_SCATTER,
    "_reduce_scatter_base_": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_tensor": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_tensor_out": CollectiveKind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": CollectiveKind.REDUCE_SCATTER,
    "allreduce_": CollectiveKind.ALL_REDUCE,
    "allreduce_coalesced_": CollectiveKind.ALL_REDUCE,
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_reduce_": CollectiveKind.ALL_REDUCE,
    "all_reduce_coalesced": CollectiveKind.ALL_REDUCE,
    "all_reduce_coalesced_": CollectiveKind.ALL_REDUCE,
    "alltoall_": CollectiveKind.ALL_TO_ALL,
    "alltoall_base_": CollectiveKind.ALL_TO_ALL,
    "all_to_all_single": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "broadcast_": CollectiveKind.BROADCAST,
    "scatter_": CollectiveKind.BROADCAST,
    "reduce_": CollectiveKind.REDUCE,
    "gather_": CollectiveKind.REDUCE,
    "send": CollectiveKind.SEND_RECV,
    "recv_": CollectiveKind.SEND_RECV,
    "recv_any_source_": CollectiveKind.SEND_RECV,
    "isend": CollectiveKind.SEND_RECV,
    "irecv": CollectiveKind.SEND_RECV,
    "batch_p2p_ops": CollectiveKind.SEND_RECV,
}
"""c10d's gather and scatter move what a reduce and a broadcast of the whole do at most: counted as such."""

_OUTPUTS: Final = frozenset({"output_tensor", "output_tensors", "output", "outputs", "output_lists", "out"})
_INPUTS: Final = frozenset({"input_tensor", "input_tensors", "input", "inputs", "input_list"})
_IN_PLACE: Final = frozenset({"tensors", "tensor"})
_ONLY_READ: Final = frozenset({"send", "isend"})
_ONLY_WRITTEN: Final = frozenset({"recv_", "recv_any_source_", "irecv"})


class UnknownCollectiveError(Exception):
    """Raised for an operator of these namespaces that the table does not know."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One call: its kind, its whole payload in bytes (as `Collective.num_bytes`), what it reads and writes, its ranks.

    `is_async` says that the caller's stream does not wait for it.
    """

    kind: CollectiveKind
    num_bytes: int
    reads: tuple[torch.Tensor, ...]
    writes: tuple[torch.Tensor, ...]
    group: dist.ProcessGroup
    is_async: bool


def tensors_in(tree: object) -> tuple[torch.Tensor, ...]:
    """The tensors of nested arguments, in order."""
    return tuple(leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _group_of(arguments: Mapping[str, Any]) -> dist.ProcessGroup:
    """The process group among the arguments: boxed, plain, or by name."""
    for name in ("process_group", "group_name"):
        value = arguments.get(name)
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, str):
            return torch._C._distributed_c10d._resolve_process_group(GroupName(value))
        if value is not None:
            boxed = getattr(value, "real_obj", value)  # a FakeScriptObject wraps the boxed group
            return dist.ProcessGroup.unbox(boxed)
    raise UnknownCollectiveError("has no process group")


def is_ignored(short_name: str) -> bool:
    """Whether a collective moves no data worth counting (a barrier)."""
    return short_name in _IGNORED


def collective_call(short_name: str, arguments: Mapping[str, Any], result: object) -> CollectiveCall:
    """What a collective operator does; `short_name` is its name without namespace and overload.

    Raises:
        UnknownCollectiveError: if the operator is none of the table, or its ranks cannot be told.
    """
    kind = _KINDS.get(short_name)
    if kind is None:
        raise UnknownCollectiveError("is not known")
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for name, value in arguments.items():
        tensors = tensors_in(value)
        in_place = name in _IN_PLACE
        if (name in _INPUTS or in_place) and short_name not in _ONLY_WRITTEN:
            reads += tensors
        if name in _OUTPUTS or (in_place and short_name not in _ONLY_READ):
            writes += tensors
    if short_name.endswith("_") and not writes:  # all_reduce_, broadcast_: in place on `input`
        writes = list(reads)
    if not writes and short_name not in _ONLY_READ:
        writes = list(tensors_in(result))
    whole = writes if kind.traits.takes_part or not reads else reads
    return CollectiveCall(
        kind=kind,
        num_bytes=_bytes(whole),
        reads=tuple(reads),
        writes=tuple(writes),
        group=_group_of(arguments),
        is_async=bool(arguments.get("async_op", True)),
    )
