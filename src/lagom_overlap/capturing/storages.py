"""Storages and layouts: who wrote a piece of memory, and which dimension of a view is which dimension of its base.

A tensor that reaches an operator is often a view (transposed, reshaped, sliced) of what another one made. Whether its
dimension v can be cut together with dimension d of the base follows from sizes and strides alone: both cut the memory
at the same places exactly if size x stride is equal, for then the piece of an element is the same digit of its address.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes and strides (elements) of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        """The layout of a strided tensor."""
        return cls(tuple(int(n) for n in tensor.shape), tuple(int(n) for n in tensor.stride()))


def aligned_dims(base: Layout, view: Layout) -> tuple[int | None, ...]:
    """For each dimension of `view` the dimension of `base` that is cut at the same places, or None.

    Cut into N equal pieces, where N divides both lengths, the two give the same parts of memory.
    """
    extents = {n * s: d for d, (n, s) in enumerate(zip(base.shape, base.stride, strict=True)) if n > 1 and s > 0}
    return tuple(extents.get(n * s) if n > 1 else None for n, s in zip(view.shape, view.stride, strict=True))


def num_bytes_of(tensor: torch.Tensor) -> int:
    """Bytes that a kernel touches to read the whole tensor: an expanded dimension counts once."""
    elements = prod(int(n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if s != 0)
    return elements * tensor.element_size()


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage while somebody holds a `StorageWeakRef` to it."""
    return int(tensor.untyped_storage()._cdata)


_weak: Callable[[torch.UntypedStorage], Any] = StorageWeakRef


@dataclass(slots=True)
class StoredTensor:
    """What is known about one storage: its last writer and the readers since then, by number of operator.

    `layout` is that of the tensor as its last writer made it. `buffer` numbers the memory it lives in; None: it was
    there before the step. `is_parameter` marks parameters, sharded or gathered.
    """

    ref: Any  # torch's StorageWeakRef, which has no types
    num_bytes: int
    buffer: int | None
    is_parameter: bool = False
    writer: int | None = None
    layout: Layout | None = None
    readers: list[int] | None = None
    made_from: int | None = None


class StorageTable:
    """The storages of a step by identity; a freed and reallocated storage is another memory."""

    def __init__(self) -> None:
        self._known: dict[int, StoredTensor] = {}
        self._kept: list[Any] = []
        self.num_buffers = 0

    def find(self, tensor: torch.Tensor) -> StoredTensor | None:
        """What is known about a tensor's storage, if anything."""
        return self._known.get(storage_key(tensor))

    def external(self, tensor: torch.Tensor) -> StoredTensor:
        """The entry of a tensor that is read; one that nobody made in this step was there before it."""
        known = self.find(tensor)
        if known is None:
            known = self._add(tensor, None)
        return known

    def fresh(self, tensor: torch.Tensor) -> StoredTensor:
        """The entry of a tensor that was made just now."""
        known = self.find(tensor)
        return known if known is not None else self._add(tensor, self._new_buffer())

    def alias(self, tensor: torch.Tensor, entry: StoredTensor) -> None:
        """`tensor` is the same memory as `entry`, even where a fake tensor has a storage of its own."""
        key = storage_key(tensor)
        if key not in self._known:
            self._kept.append(_weak(tensor.untyped_storage()))
            self._known[key] = entry

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was freed or allocated again: what it held is gone, what it will hold is new."""
        key = int(storage._cdata)
        known = self._known.get(key)
        is_parameter = known is not None and known.is_parameter
        size = int(storage.nbytes())
        self._known[key] = StoredTensor(_weak(storage), size, self._new_buffer(), is_parameter)

    def alive(self) -> list[StoredTensor]:
        """The storages that somebody still holds and that are not freed."""
        return [entry for entry in self._known.values() if entry.num_bytes and not entry.ref.expired()]

    def resident_bytes(self) -> int:
        """Bytes of what was there before the step and was used in it."""
        there = {id(entry): entry.num_bytes for entry in self._known.values() if entry.buffer is None}
        return sum(there.values())

    def _new_buffer(self) -> int:
        self.num_buffers += 1
        return self.num_buffers - 1

    def _add(self, tensor: torch.Tensor, buffer: int | None) -> StoredTensor:
        storage = tensor.untyped_storage()
        entry = StoredTensor(_weak(storage), int(storage.nbytes()), buffer)
        self._known[int(storage._cdata)] = entry
        return entry
