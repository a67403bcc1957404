"""Bytes that PyTorch's operators read and write on a GPU, by the sizes of their tensors."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

_READS_NOTHING: Final = frozenset(
    {
        "copy_",
        "fill_",
        "zero_",
        "normal_",
        "uniform_",
        "random_",
        "arange",
        "bernoulli_",
        "_foreach_copy_",
        "_foreach_zero_",
    }
)
"""In-place operators that do not read what they write."""
_GATHERS: Final = frozenset({"embedding", "index", "index_select", "gather", "take"})
"""They read only what they take out."""
_REDUCES: Final = frozenset(
    {"sum", "mean", "amax", "amin", "argmax", "max", "min", "norm", "linalg_vector_norm", "any"}
)
_SOFTMAX_READS: Final = {
    "_softmax": 3,
    "_log_softmax": 3,
    "_softmax_backward_data": 2,
    "_log_softmax_backward_data": 2,
}
"""How often their kernels read a row of the first argument that does not fit into shared memory (`SoftMax.cu`)."""
_SHARED_BYTES: Final = 48 << 10


def bytes_of(torch: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Bytes that an operator reads and writes on the GPU; None where it has nothing there."""
    name = func._schema.name.partition("::")[2]
    read = written = largest = 0
    on_gpu = False
    declared = {argument.name: argument for argument in func._schema.arguments}
    values = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    values |= kwargs
    for key, value in values.items():
        argument = declared.get(key)
        alias = None if argument is None else argument.alias_info
        is_written = alias is not None and alias.is_write
        for tensor in _tensors(torch, value):
            if not tensor.is_cuda:
                continue
            on_gpu = True
            size = tensor.numel() * tensor.element_size()
            largest = max(largest, size)
            written += size if is_written else 0
            is_output = is_written and argument is not None and argument.is_out
            read += 0 if is_output or (is_written and name in _READS_NOTHING) else size
    device = kwargs.get("device")
    if not on_gpu and (device is None or torch.device(device).type != "cuda"):
        return None
    if name == "all_gather_copy_in":  # FSDP2's: the shards go into the rank's own part of the whole buffer
        return int(2 * sum(tensor.numel() * tensor.element_size() for tensor in _tensors(torch, args[0])))
    if name in ("nll_loss_forward", "nll_loss_backward"):  # one element of a row; backward's zeros are a memset's
        scores, targets = (values[key] for key in ("self", "target"))
        return int(targets.numel() * (scores.element_size() + targets.element_size()))
    if name in _SOFTMAX_READS:
        read += (_SOFTMAX_READS[name] - 1) * _read_again(args[0])
    if name == "index_put_":
        return _put(torch, args)
    if not on_gpu or name == "_to_copy":
        written = _made(torch, args, kwargs, largest)
    elif name in _GATHERS:
        read = written = _gathered(torch, name, args)
    elif not written and name not in _REDUCES:
        written = read if name == "cat" else largest
    return read + written


_WIRE: Final[Mapping[str, Callable[[int], float]]] = {
    "one_shot_all_reduce": lambda n: n - 1,
    "two_shot_all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "multimem_all_reduce": lambda n: 1 + 1 / n,
    "multimem_one_shot_all_reduce": lambda n: n,
    "multimem_one_shot_reduce": lambda n: 1,
    "multimem_all_gather": lambda n: n - 1,
}
"""Bytes of an input that PyTorch's kernels on symmetric memory move through a GPU's busier direction, n GPUs together.

One-shot kernels read every peer's input, two-shot ones a part of each and then each one's result. Behind a switch that
adds (multimem), a GPU hands out its input once for each that asks for the sum, and the results of parts come to all
(torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu of PyTorch 2.15).
"""


def wire_bytes_of(torch: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Bytes between GPUs of an operator on symmetric memory; 0 for any other."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace != "symm_mem":
        return 0
    share = _WIRE.get(name.removesuffix("_out").removesuffix("_copy").removesuffix("_"))
    if share is None:
        return 0
    values = {**dict(zip([each.name for each in func._schema.arguments], args, strict=False)), **kwargs}
    group = torch.distributed.distributed_c10d._resolve_process_group(values["group_name"])
    given = values["local_input" if "local_input" in values else "input"]
    return int(share(group.size()) * given.numel() * given.element_size())


def _read_again(rows: Any) -> int:
    """Bytes of rows that a softmax reads more than once, along the last dimension."""
    is_long = rows.dim() and rows.shape[-1] * rows.element_size() >= _SHARED_BYTES
    return int(rows.numel() * rows.element_size()) if is_long else 0


def _put(torch: Any, args: Sequence[Any]) -> int:
    """Bytes of the values and indices that are read, and of the elements that are written there."""
    table, indices, values = args[:3]
    places = list(_tensors(torch, indices))
    count = max((place.numel() for place in places), default=0)
    num_dims = sum(place.dim() if place.dtype is torch.bool else 1 for place in places)
    read = sum(each.numel() * each.element_size() for each in (*places, values))
    return int(read + count * math.prod(table.shape[num_dims:]) * table.element_size())


def _tensors(torch: Any, value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            if isinstance(each, torch.Tensor):
                yield each


def _made(torch: Any, args: Sequence[Any], kwargs: Mapping[str, Any], largest: int) -> int:
    """Bytes of a new tensor: of the sizes given, or of another type than the one that is copied."""
    dtype = kwargs.get("dtype")
    first = args[0] if args else None
    if isinstance(first, torch.Tensor):
        return int(first.numel() * (dtype.itemsize if dtype is not None else first.element_size()))
    if isinstance(first, (list, tuple)) and all(isinstance(size, int) for size in first):
        count = 1
        for size in first:
            count *= size
        return int(count * (dtype.itemsize if dtype is not None else 4))
    return largest


def _gathered(torch: Any, name: str, args: Sequence[Any]) -> int:
    """Bytes that a gathering operator takes out of its first argument."""
    table = args[0]
    indices = [tensor for value in args[1:] for tensor in _tensors(torch, value)]
    count = max((tensor.numel() for tensor in indices), default=0)
    if name == "gather":
        return int(count * table.element_size())
    row = table.numel() // max(1, table.shape[0]) if table.dim() else 1
    return int(count * row * table.element_size())
