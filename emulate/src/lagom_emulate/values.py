"""What tensors hold on emulated GPUs: small operators are computed on the CPU, and what nobody computed is remembered.

The device runs few kernels itself (fills, copies, index arithmetic). Every other operator of PyTorch whose tensors are
small, or whole numbers of moderate size, is computed here by PyTorch's own CPU operator, on the GPU's memory, which is
this process's. Outputs of the rest are marked as not computed, and so is what follows from them; they are zero, and
what an operator should have changed in place stays as it was. The host reads zeros there: a loss that is printed, an
overflow flag, a checkpoint. Whole numbers beyond bytes, and sizes, decide what a job does next, so reading them is
refused, by the name of the operator that they rest on, unless they are saved. A loop whose end rests on such a truth
value may never end (`uncomputed_reads.py`).

An error of ours concerns the operator that it came from: one line for each, and what it gives is not computed.

Marks are kept by the address of a tensor's storage. What writes memory without a dispatched operator (Triton's kernels)
neither sets nor clears them.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from lagom_emulate.saving import is_saving
from lagom_emulate.uncomputed_reads import UncomputedReads, UncomputedValueError

MAX_ELEMENTS: Final = 1 << 18
"""Of floats, all tensors of an operator together: some 0.1 ms of one core for what is done element by element."""
MAX_INTEGERS: Final = 1 << 22
"""Of operators on whole numbers and truth values alone: routing tables, masks, counts."""
MAX_OWED: Final = 64
"""Floats whose collective is waited for: more would hold the host where a GPU's host goes on. A job that has sizes
decided by values is held for all: they cannot be known in another way."""
COLLECTIVES: Final = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
_SIZED: Final = frozenset({"aten::bincount", "aten::nonzero", "aten::masked_select"})
_FLOATS_ONLY: Final = frozenset({"aten::histc"})
"""A GPU counts whole numbers by them, too (the experts of torchtitan's tokens), the CPU has none for these."""
_PLAIN_WRITES: Final = frozenset({"copy_", "fill_", "zero_"})
"""The device runs them itself; they write all of a tensor and read nothing of it."""
_OVERWRITES: Final = _PLAIN_WRITES | {"normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
_SHAPES_ONLY: Final = frozenset(
    f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
)
"""They read no value of the tensor that they are given."""
_READS: Final = frozenset({"_local_scalar_dense", "_to_copy", "copy_"})
"""Operators by which the host reads what a GPU holds."""


class Memory(Protocol):
    """What this module asks of the emulated driver."""

    def inexact_launches(self) -> int:
        """Kernels that this thread launched so far and that computed nothing."""

    def settle(self, address: int, num_bytes: int, *, may_wait: bool) -> bool:
        """Brings what a collective still owes there; whether nothing is owed any more."""

    def counted(self, number: int) -> contextlib.AbstractContextManager[None]:
        """What this thread's operators read meanwhile where their kernels count."""

    def clear(self, address: int, num_bytes: int) -> None:
        """Zeros, which take no page."""

    def refuse(self, text: str) -> None:
        """Ends the job with a line."""


@dataclass(slots=True)
class _Begun:
    """An operator that runs: its tensors, launches before it, the mark on what it reads, what the CPU made of it."""

    given: list[Any]
    written: list[Any]
    launches: int
    mark: str | None
    early: "_Computed | None" = None
    is_sized: bool = False


@dataclass(slots=True)
class _Computed:
    """What the CPU's operator gave, and the new values of the GPU's tensors that it wrote."""

    result: Any
    written: list[tuple[Any, Any]]


class _OwedError(Exception):
    """A collective is still to bring what would be read."""


class Values:
    """The contents of one process's GPU tensors, operator by operator.

    `complain` is told of an operator's first error of ours, and its name; `note_saved` that zeros were saved for what
    nobody computed, once.
    """

    def __init__(
        self,
        torch: Any,
        memory: Memory,
        complain: Callable[[str, BaseException], None],
        note_saved: Callable[[], None],
    ) -> None:
        self._torch, self._memory, self._complain, self._note_saved = torch, memory, complain, note_saved
        self._plain = (torch.Tensor, torch.nn.Parameter)
        self._marks: dict[int, str] = {}
        self._hopeless: set[tuple[Any, Any]] = set()
        self._failed: set[str] = set()
        self._has_saved = False
        self._reads = UncomputedReads(memory.refuse)
        self._decides = False  # the job has asked for sizes or counts

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        """What `call`, the operator itself, gives, with its values where they can be had.

        Raises:
            UncomputedValueError: if it would decide by values that nobody computed.
        """
        try:
            begun = self._begin(func, args, kwargs)
        except UncomputedValueError:
            raise
        except Exception as error:
            self._fail(func, error)
            return call()
        if begun.is_sized and begun.early is not None:
            # Its kernels take their time, on as much as they would have counted, which is known already.
            with contextlib.suppress(RuntimeError), self._memory.counted(self._count(func, args, begun.early.result)):
                call()
            return self._mapped(begun.early.result, lambda tensor: self._placed(tensor, begun))
        if func._schema.name == "aten::equal":
            self._reads.note()
            with self._memory.counted(0):  # which its last kernel would have left
                return call()
        out = call()
        try:
            return self._finish(func, args, kwargs, begun, out)
        except UncomputedValueError:
            raise
        except Exception as error:
            self._fail(func, error)
        return out

    def progressed(self) -> None:
        """A step has ended."""
        self._reads.forget()

    def known_on_host(self, tensor: Any) -> Any:
        """A copy of what a tensor of the GPU holds; None where nobody computed it, or a collective owes it."""
        if self._mark_of([tensor]) is not None:
            return None
        try:
            return self._held(tensor).clone()
        except _OwedError:
            return None

    def _on_gpu(self, tensor: Any) -> bool:
        return bool(tensor.is_cuda) and tensor.layout is self._torch.strided  # others have no storage

    def _is_capturing(self) -> bool:
        """What a graph records runs later, and again."""
        return bool(self._torch.cuda.is_current_stream_capturing())

    def _fail(self, func: Any, error: BaseException) -> None:
        if func._schema.name not in self._failed:
            self._failed.add(func._schema.name)
            self._complain(func._schema.name, error)

    def _begin(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Begun:
        namespace, _, name = func._schema.name.partition("::")
        given = list(self._tensors(args, kwargs))
        written = self._written(func, args, kwargs)
        read = [tensor for tensor in given if name not in _OVERWRITES or all(tensor is not each for each in written)]
        mark = None if name in _SHAPES_ONLY or name.startswith("new_") else self._mark_of(read)
        begun = _Begun(given, written, self._memory.inexact_launches(), mark)
        if namespace in COLLECTIVES:
            return begun
        tags = self._torch.Tag
        on_gpu = any(self._on_gpu(tensor) for tensor in given)
        if (
            on_gpu
            and (tags.dynamic_output_shape in func.tags or func._schema.name in _SIZED)
            and _is_masked(func, args)
        ):
            self._decides = True
            deciding = [tensor for tensor in given if not tensor.dtype.is_floating_point] or given
            if mark := self._mark_of(deciding):
                raise UncomputedValueError(_refusal(func, mark))
            begun.early = self._computed(func, args, kwargs, given, (), most=4 * MAX_INTEGERS)
            begun.is_sized = True
            if begun.early is None and not self._is_capturing():
                raise UncomputedValueError(_refusal(func, "an operator"))
        elif on_gpu and func._schema.name == "aten::equal":
            begun.early = self._computed(func, args, kwargs, given, ())
            begun.is_sized = True
        elif written and name not in _PLAIN_WRITES and all(self._on_gpu(tensor) for tensor in written):
            begun.early = self._computed(func, args, kwargs, given, written)
        return begun

    def _count(self, func: Any, args: Sequence[Any], result: Any) -> int:
        """The number by which an operator sizes its result."""
        if func._schema.name == "aten::index":
            return int(self._held(next(filter(_is_mask, args[1]))).count_nonzero())
        if isinstance(result, bool):
            return int(result)
        first = next(iter(self._tensors((result,), {})))
        rows = len(first) if first.dim() else 1
        return max(0, rows - 1) if func._schema.name == "aten::bincount" else rows  # by the greatest value

    def _placed(self, tensor: Any, begun: _Begun) -> Any:
        device = next(each.device for each in begun.given if self._on_gpu(each))
        placed = tensor.to(device)
        self._note([placed], begun.mark, may_clear=True)
        return placed

    def _finish(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], begun: _Begun, out: Any) -> Any:
        """Keeps the marks; gives what the caller gets."""
        namespace, _, name = func._schema.name.partition("::")
        made = list(self._tensors((out,), {}))
        if name == "lift_fresh":  # torch.tensor's, which copies what the host has where nobody is told of it
            self._note(begun.given, None, may_clear=True)
            return out
        if begun.mark is not None and name in _READS:
            out = self._read(func, args, out, begun.mark)
        if func.is_view:
            return out
        if namespace in COLLECTIVES:
            # Which of its tensors it writes, the schemas do not say; ranks do alike.
            self._note([*begun.given, *made], begun.mark, may_clear=True)
            return out
        is_exact = self._memory.inexact_launches() == begun.launches
        if not is_exact and begun.written:
            is_exact = self._store(begun.early, out)
        elif not is_exact:
            is_exact = self._store(self._computed(func, args, kwargs, [*begun.given, *made], ()), out)
        if not is_exact:
            self._clear(made, begun, overwrites=name in _OVERWRITES or _writes_out(func))
        mark = begun.mark if is_exact else func._schema.name
        self._note([*begun.written, *made], mark, may_clear=not begun.written or name in _OVERWRITES)
        return out

    def _read(self, func: Any, args: Sequence[Any], out: Any, mark: str) -> Any:
        """What the host gets where it reads what nobody computed: zeros.

        Bytes are contents (a storage that is saved, an image) or flags, of which zero says no.

        Raises:
            UncomputedValueError: for other whole numbers, unless they are saved.
        """
        torch = self._torch
        source, target = (args[1], args[0]) if func._schema.name.endswith("::copy_") else (args[0], out)
        is_tensor = isinstance(target, torch.Tensor)
        if not self._on_gpu(source) or (is_tensor and self._on_gpu(target)):
            return out
        is_kept = is_tensor and is_saving()
        dtype = source.dtype
        if dtype is torch.bool:
            self._reads.note()
        may_decide = not dtype.is_floating_point and not dtype.is_complex and dtype not in (torch.bool, torch.uint8)
        if may_decide and not is_kept:
            raise UncomputedValueError(_refusal(func, mark))
        if is_kept and not self._has_saved:
            self._has_saved = True
            self._note_saved()
        return target.zero_() if is_tensor else type(out)()

    def _clear(self, made: Sequence[Any], begun: _Begun, *, overwrites: bool) -> None:
        """Leaves zeros where an operator should have made something; not in what it changes, or hands through."""
        given = {each.untyped_storage().data_ptr() for each in begun.given if self._on_gpu(each)}
        for tensor in made:
            if self._on_gpu(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.clear(tensor)
        for tensor in begun.written if overwrites else ():
            self.clear(tensor)

    def clear(self, tensor: Any) -> None:
        """Leaves zeros in a tensor of the GPU; not where others' elements lie between its own."""
        if (
            self._on_gpu(tensor)
            and tensor.numel()
            and self._torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        ):
            self._memory.clear(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def _mark_of(self, tensors: Sequence[Any]) -> str | None:
        marks = self._marks
        if not marks:
            return None
        for tensor in tensors:
            if self._on_gpu(tensor) and (found := marks.get(tensor.untyped_storage().data_ptr())):
                return found
        return None

    def _note(self, tensors: Sequence[Any], mark: str | None, *, may_clear: bool) -> None:
        for tensor in tensors:
            if not self._on_gpu(tensor):
                continue
            storage = tensor.untyped_storage()
            if mark is not None:
                self._marks[storage.data_ptr()] = mark
            elif may_clear and tensor.numel() * tensor.element_size() == storage.nbytes():
                self._marks.pop(storage.data_ptr(), None)

    def _written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        if not func._schema.is_mutable:
            return []
        names = [argument.name for argument in func._schema.arguments if _is_written(argument)]
        values = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
        return list(self._tensors([values[name] for name in names if name in values], {}))

    def _computed(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Any],
        written: Sequence[Any],
        *,
        most: int = MAX_INTEGERS,
    ) -> _Computed | None:
        """The CPU's operator on the same values; None where it is not to be run."""
        if func.is_view or not tensors:
            return None
        key = func, tensors[0].dtype
        if key in self._hopeless or not self._is_small(tensors, most) or self._is_capturing():
            return None
        is_whole = func._schema.name in _FLOATS_ONLY and not tensors[0].dtype.is_floating_point
        try:
            copies = {id(tensor): self._held(tensor).clone() for tensor in written}

            def on_host(tensor: Any) -> Any:
                copy = copies.get(id(tensor))
                held = copy if copy is not None else self._held(tensor) if self._on_gpu(tensor) else tensor
                return held.double() if is_whole else held

            with self._drawing(func, kwargs.get("generator")):
                result = func(*self._mapped(tuple(args), on_host), **self._mapped(dict(kwargs), on_host))
                result = result.to(tensors[0].dtype) if is_whole else result
        except _OwedError:
            return None
        except Exception:
            self._hopeless.add(key)  # no such operator on the CPU, or not for these types
            return None
        return _Computed(result, [(tensor, copies[id(tensor)]) for tensor in written])

    @contextlib.contextmanager
    def _drawing(self, func: Any, generator: Any) -> Iterator[None]:
        """Random numbers by the GPU's seed and offset, other ones than a GPU draws; the CPU's own sequence stays."""
        torch = self._torch
        if torch.Tag.nondeterministic_seeded not in func.tags:
            yield
            return
        given = generator or torch.cuda.default_generators[torch.cuda.current_device()]
        state = torch.get_rng_state()
        try:
            torch.default_generator.manual_seed((given.initial_seed() * 1_000_003 + given.get_offset()) % (1 << 63))
            yield
        finally:
            torch.set_rng_state(state)

    def _store(self, found: _Computed | None, out: Any) -> bool:
        """Writes what was computed to where the GPU's operator would have; whether it fits."""
        if found is None:
            return False
        made, computed = list(self._tensors((out,), {})), list(self._tensors((found.result,), {}))
        if len(made) != len(computed):
            return False
        written = {id(tensor) for tensor, _ in found.written}
        pairs = found.written + [
            (t, c) for t, c in zip(made, computed, strict=True) if id(t) not in written and self._on_gpu(t)
        ]
        if any(tensor.shape != value.shape or tensor.dtype != value.dtype for tensor, value in pairs):
            return False
        for tensor, value in pairs:
            if tensor.numel():
                self._held(tensor, is_read=False).copy_(value)
        return True

    def _is_small(self, tensors: Sequence[Any], most: int) -> bool:
        count = sum(tensor.numel() for tensor in tensors)
        if (
            any(tensor.dtype.is_floating_point or tensor.dtype.is_complex for tensor in tensors)
            and most <= MAX_INTEGERS
        ):
            return bool(count <= MAX_ELEMENTS)
        return bool(count <= most)

    def _held(self, tensor: Any, *, is_read: bool = True) -> Any:
        """The GPU's memory of a tensor as one of the CPU.

        Raises:
            _OwedError: if a collective still owes it, and is not waited for.
        """
        torch = self._torch
        if tensor.layout != torch.strided or tensor.is_neg() or tensor.is_conj():
            raise ValueError("no plain tensor")
        size, stride = tensor.size(), tensor.stride()
        if not tensor.numel():
            return torch.empty(size, dtype=tensor.dtype)
        span = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        num_bytes = span * tensor.element_size()
        # What an earlier collective owes to memory that was freed and taken again would come over what is written now.
        few = not tensor.dtype.is_floating_point or tensor.numel() <= MAX_OWED
        may_wait = not is_read or self._decides or few
        if not self._memory.settle(tensor.data_ptr(), num_bytes, may_wait=may_wait) and is_read:
            raise _OwedError
        buffer = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr())
        return torch.frombuffer(buffer, dtype=tensor.dtype, count=span).as_strided(size, stride)

    def _tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
        for value in (*args, *kwargs.values()):
            if type(value) in self._plain:  # fake tensors have no memory
                yield value
            elif isinstance(value, (list, tuple)):
                yield from self._tensors(value, {})

    def _mapped(self, value: Any, change: Callable[[Any], Any]) -> Any:
        """The same structure with every tensor changed, and on the CPU where a device is named."""
        torch = self._torch
        if isinstance(value, torch.Tensor):
            return change(value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            return None
        if isinstance(value, (list, tuple)):
            return type(value)([self._mapped(each, change) for each in value])
        if isinstance(value, dict):
            return {key: self._mapped(each, change) for key, each in value.items()}
        return value


def _is_masked(func: Any, args: Sequence[Any]) -> bool:
    """Indexing has a size of its own only with masks."""
    if func._schema.name != "aten::index":
        return True
    return any(_is_mask(index) for index in args[1])


def _is_mask(index: Any) -> bool:
    return index is not None and str(index.dtype) in ("torch.bool", "torch.uint8")


def _writes_out(func: Any) -> bool:
    return any(argument.is_out for argument in func._schema.arguments)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _refusal(func: Any, mark: str) -> str:
    return (
        f"lagom emulate: {func._schema.name} would read what {mark} left: values of large kernels are not computed "
        "here, and the job would decide by them; let it not depend on them (routing: force equal loads)"
    )
