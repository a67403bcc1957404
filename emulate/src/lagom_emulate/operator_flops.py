"""Flops of PyTorch's operators, by the formulas of `torch.utils.flop_counter`, a job's own among them.

Formulas are asked before the operator runs. Most look at its arguments alone. One that looks at its result is asked
again with a fake of it, which PyTorch makes from the sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from lagom_emulate.operator_outputs import Outputs


class Formulas:
    """PyTorch's registry. `known_on_host` copies a small tensor of whole numbers; None: nobody computed it."""

    def __init__(self, torch: Any, outputs: Outputs, known_on_host: Callable[[Any], Any]) -> None:
        self._torch, self._outputs, self._known_on_host = torch, outputs, known_on_host
        self._registry: Mapping[Any, Callable[..., int]] | None = None

    def fields(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, float]:
        """What a description says of an operator's flops; empty where PyTorch has no formula for it.

        Raises:
            Exception: whatever the formula raises.
        """
        formula = self.formula(func._overloadpacket)
        if formula is None:
            return {}
        name = func._schema.name
        given = _with_all_heads(self._torch, args) if "scaled_dot_product" in name else args
        counted = [self._readable(value) for value in given]
        named = {key: self._readable(value) for key, value in kwargs.items()}
        try:
            flops = formula(*counted, **named, out_val=_Later())
        except _NotYetError:
            flops = formula(*counted, **named, out_val=self._outputs.of(func, args, kwargs))
        if "attention" not in name:
            return {"flops": int(flops)}
        # PyTorch's counter takes attention in full; a causal kernel skips half of it.
        share = 0.5 if _by_name(func, args, kwargs).get("is_causal") else 1.0
        return {"flops": int(share * flops)} | _attention_sizes(func, args, kwargs, share)

    def formula(self, target: Any) -> Callable[..., int] | None:
        """Of an operator, or of a Triton kernel that a job has registered one for."""
        if self._registry is None:
            from torch.utils.flop_counter import flop_registry  # noqa: PLC0415 - slow to import, and torch is the job's

            self._registry = flop_registry
        return self._registry.get(target)

    def _readable(self, value: Any) -> Any:
        """Lengths of packed sequences, which a formula reads: on a GPU that would launch kernels of ours in the job."""
        if not isinstance(value, self._torch.Tensor) or not value.is_cuda or value.dim() != 1:
            return value
        if value.dtype not in (self._torch.int32, self._torch.int64):
            return value
        known = self._known_on_host(value)
        # Of "meta" tensors a formula takes every sequence for as long as the longest.
        return known if known is not None else self._torch.empty_like(value, device="meta")


class _NotYetError(Exception):
    """A formula looks at a result that is not there yet."""


class _Later:
    """Stands for a result: whatever is asked of it raises."""

    def _ask(self, *_: Any) -> NoReturn:
        raise _NotYetError

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = _ask


def _with_all_heads(torch: Any, args: Sequence[Any]) -> list[Any]:
    """Attention's arguments for PyTorch's counter, where queries share keys: shapes with as many heads everywhere.

    Up to PyTorch 2.10 it refuses others.
    """
    tensors = [each for each in args if isinstance(each, torch.Tensor) and each.dim() == 4]
    heads = max((each.shape[1] for each in tensors), default=0)
    if all(each.shape[1] == heads for each in tensors):
        return list(args)
    return [
        torch.Size((each.shape[0], heads, *each.shape[2:])) if any(each is one for one in tensors) else each
        for each in args
    ]


def _attention_sizes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], share: float) -> dict[str, float]:
    """What the rate of an attention depends on: a head's columns, and how far its queries reach (`Attention.reach`)."""
    values = _by_name(func, args, kwargs)
    query, key = values.get("query"), values.get("key")
    if query is None or key is None or query.dim() != 4 or not key.numel():
        return {}
    keys = key.shape[2] if "scaled_dot_product" in func._schema.name else key.shape[1]
    return {"head_dim": query.shape[-1], "reach": 2 * share * keys}


def _by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
