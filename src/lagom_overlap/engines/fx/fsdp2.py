"""FSDP2 told a plan's settings: calls of `FSDPModule` on a model that `fully_shard` has sharded."""

from collections.abc import Sequence
from typing import Any, Final, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lagom_overlap.engines.fx.fsdp2_settings import Fsdp2Settings
from lagom_overlap.errors import JobError

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
    return {", ".join(found): first[state] for state, found in names.items()}


def _has_parameters(state: Any) -> bool:
    groups = getattr(state, "_fsdp_param_groups", None)
    return bool(groups) if groups is not None else state._fsdp_param_group is not None


SettingCall = tuple[FSDPModule, str, tuple[object, ...], dict[str, object]]
"""A module, its method, and the arguments."""


def apply_settings(model: nn.Module, settings: Fsdp2Settings, units: Sequence[nn.Module] | None = None) -> None:
    """Tells FSDP2 the settings, before the first forward; losses and gradients stay what they are, bit for bit.

    Raises:
        JobError: as `setting_calls`; nothing is set then.
    """
    make_calls(setting_calls(model, settings, units))


def make_calls(calls: Sequence[SettingCall]) -> None:
    """Makes them, in order."""
    for module, method, arguments, keywords in calls:
        getattr(module, method)(*arguments, **keywords)


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
                calls.append((module, f"set_modules_to_{phase}_prefetch", ([modules[one] for one in listed],), {}))
        if name in settings.kept:
            calls.append((module, "set_reshard_after_forward", (False,), {"recurse": False}))
    if settings.reduce_buffers > 1:
        calls.append((model, "set_reduce_scatter_max_input_buffers", (settings.reduce_buffers,), {}))
    if settings.separate_reduce_group:
        calls.append((model, "set_separate_reduce_scatter_group", (True,), {}))
    for module, method, _, _ in calls:
        if not hasattr(module, method):
            raise JobError(f"apply_fsdp2: this PyTorch has no FSDPModule.{method}; 2.13 has")
    return calls


def _matched(model: nn.Module, settings: Fsdp2Settings, units: Sequence[nn.Module] | None) -> dict[str, FSDPModule]:
    """The plan's units as modules, in the plan's order."""
    if units is not None:
        if len(units) != len(settings.units) or not all(isinstance(unit, FSDPModule) for unit in units):
            raise JobError(
                f"apply_fsdp2: units are {len(units)} modules, the plan has {len(settings.units)} sharded ones: "
                f"{', '.join(settings.units)}"
            )
        return dict(zip(settings.units, cast("Sequence[FSDPModule]", units), strict=True))
    found = sharded_units(model)
    for what, names, others in (("the plan's", settings.units, found), ("the model's", found, settings.units)):
        missing = [name for name in names if name not in others]
        if missing:
            raise JobError(
                f"apply_fsdp2: {what} unit {missing[0]!r} is none of the other's: the plan has "
                f"{', '.join(settings.units)}; the model has {', '.join(found)}. Give units=[...] if only names differ"
            )
    return {name: found[name] for name in settings.units}
