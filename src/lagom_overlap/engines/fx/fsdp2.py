"""FSDP2 told a plan's settings: calls of `FSDPModule` on a model that `fully_shard` has sharded."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lagom_overlap.errors import JobError
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings

_WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""


def sharded_units(model: nn.Module) -> dict[str, FSDPModule]:
    """The modules below `model` that gather parameters of their own, by name, as FSDP2 and captures name them.

    Modules that were sharded together are one unit, `"norm, head"`, represented by the first.
    """
    names: dict[int, list[str]] = {}
    first: dict[int, FSDPModule] = {}
    for name, module in model.named_modules():
        if module is model or not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if not _has_parameters(state):
            continue
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")  # noqa: PLW2901  a name without wrappers
        names.setdefault(id(state), []).append(name)
        first.setdefault(id(state), module)
    return {", ".join(unit_names): first[state] for state, unit_names in names.items()}


def _has_parameters(state: Any) -> bool:
    groups = getattr(state, "_fsdp_param_groups", None)
    return bool(groups) if groups is not None else state._fsdp_param_group is not None


SettingCall = Callable[[], object]
"""Tells FSDP2 one setting of one module."""


def apply_settings(model: nn.Module, settings: Fsdp2Settings) -> None:
    """Tells FSDP2 the settings, before the first forward.

    Losses and gradients stay what they are, bit for bit, unless `reduce_in_param_dtype` is set.

    Raises:
        JobError: as `setting_calls`; nothing is set then.
    """
    make_calls(setting_calls(model, settings))


def make_calls(calls: Iterable[SettingCall]) -> None:
    """Makes them, in order."""
    for call in calls:
        call()


def setting_calls(
    model: nn.Module, settings: Fsdp2Settings, units: Sequence[nn.Module] | None = None
) -> list[SettingCall]:
    """The calls that tell FSDP2 the settings.

    `units` are the sharded modules in the order of their forward, where their names are not the plan's.

    Raises:
        JobError: if the model's units are not the plan's, or this PyTorch lacks a setting.
    """
    if not isinstance(model, FSDPModule):
        raise JobError("apply_fsdp2: the model is not sharded; call fully_shard(model) first")
    modules = _matched(model, settings, units)
    calls: list[SettingCall] = []
    for name, module in modules.items():
        for phase, listed in (("forward", settings.forward_list(name)), ("backward", settings.backward_list(name))):
            if listed:
                calls.append(_call(module, f"set_modules_to_{phase}_prefetch", [modules[one] for one in listed]))
        if name in settings.kept:
            calls.append(_call(module, "set_reshard_after_forward", False, recurse=False))
    if settings.reduce_buffers > 1:
        calls.append(_call(model, "set_reduce_scatter_max_input_buffers", settings.reduce_buffers))
    if settings.separate_reduce_group:
        calls.append(_call(model, "set_separate_reduce_scatter_group", True))
    if settings.reduce_in_param_dtype:
        calls += _smaller_reductions(model)
    return calls


def _call(module: FSDPModule, method: str, *arguments: object, **keywords: object) -> SettingCall:
    setter = getattr(module, method, None)
    if setter is None:
        raise JobError(f"apply_fsdp2: this PyTorch has no FSDPModule.{method}; 2.13 has")
    return partial(setter, *arguments, **keywords)


def _smaller_reductions(model: nn.Module) -> Iterator[SettingCall]:
    """No method says it after `fully_shard`: policies are replaced, which FSDP2 reads before its first forward.

    Raises:
        JobError: if a policy gathers parameters in their own type, or this PyTorch keeps none where it did.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            if group is None:
                continue
            owners = [one for one in (group, *group.fsdp_params) if hasattr(one, "mp_policy")]
            if not owners:
                raise JobError("apply_fsdp2: this PyTorch keeps FSDP2's policies elsewhere; 2.11 to 2.15 are known")
            for owner in owners:
                if (dtype := owner.mp_policy.param_dtype) is None:
                    raise JobError("apply_fsdp2: reduce_in_param_dtype needs MixedPrecisionPolicy(param_dtype=...)")
                # Said outright: None means the parameters' type up to 2.14, and each gradient's own from 2.15 on.
                yield partial(setattr, owner, "mp_policy", replace(owner.mp_policy, reduce_dtype=dtype))


def _matched(model: nn.Module, settings: Fsdp2Settings, units: Sequence[nn.Module] | None) -> dict[str, FSDPModule]:
    """The plan's units as modules, in the plan's order."""
    if units is not None:
        if len(units) != len(settings.units) or not all(isinstance(unit, FSDPModule) for unit in units):
            raise JobError(
                f"apply_fsdp2: units are {len(units)} modules, the plan has {len(settings.units)} sharded ones: "
                f"{', '.join(settings.units)}"
            )
        return dict(zip(settings.units, cast("Sequence[FSDPModule]", units), strict=True))
    its_units = sharded_units(model)
    for what, names, others in (("the plan's", settings.units, its_units), ("the model's", its_units, settings.units)):
        missing = [name for name in names if name not in others]
        if missing:
            raise JobError(
                f"apply_fsdp2: {what} unit {missing[0]!r} is none of the other's: the plan has "
                f"{', '.join(settings.units)}; the model has {', '.join(its_units)}. "
                "Give units=[...] if only names differ"
            )
    return {name: its_units[name] for name in settings.units}
