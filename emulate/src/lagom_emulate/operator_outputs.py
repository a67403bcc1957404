"""What PyTorch's operators would give: sizes, strides and types, by its own fake tensors, without a kernel."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

_MAX_KEPT: Final = 4096
"""Calls with tensors of the same sizes: a model has some hundred; sizes that never repeat are not to fill memory."""


class Outputs:
    """Results as fake tensors on the GPU: they have sizes, strides and types, and no memory."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._kept: dict[Any, Any] = {}

    def of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operator's result, with what is no tensor in it as it is.

        Raises:
            Exception: whatever PyTorch raises where the operator has no fake, or its result depends on values.
        """
        key = func, _key(self._torch, (tuple(args), dict(kwargs)))
        try:
            found = self._kept.get(key)
        except TypeError:  # an argument that cannot be kept by its value
            return self._made(func, args, kwargs)
        if found is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            found = self._kept[key] = self._made(func, args, kwargs)
        return found

    def _made(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415 - slow to import, and torch is the job's

        torch = self._torch
        with FakeTensorMode():

            def fake(value: Any) -> Any:
                if isinstance(value, torch.Tensor):
                    options = {"dtype": value.dtype, "device": value.device}
                    return torch.empty_strided(value.size(), value.stride(), **options)
                if isinstance(value, (list, tuple)):
                    return type(value)([fake(each) for each in value])
                return value

            return func(*fake(tuple(args)), **{name: fake(value) for name, value in kwargs.items()})


def _key(torch: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.size()), tuple(value.stride()), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(_key(torch, each) for each in value)
    if isinstance(value, dict):
        return tuple((name, _key(torch, each)) for name, each in value.items())
    return type(value), value  # 1, 1.0 and True are three keys
