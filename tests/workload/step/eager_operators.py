"""What the operators that eager PyTorch runs read and write."""

from collections.abc import Callable
from typing import Any


def watched(see: Callable[[Any, list[Any]], None]) -> Any:
    """A mode in which `see` is given each operator that is no view, and the tensors that it takes and gives."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            if not function.is_view:
                see(function, [each for each in tree_leaves((args, kwargs, out)) if torch.is_tensor(each)])
            return out

    return Watched()
