"""A framework's file, `frameworks/NAME.toml`: all that is known of it, in a table for each who reads it.

extends        another framework, whose tables count where this file's say nothing (of all but `title`)
title          what people call it, where plans are made for its steps
[rules]        how it issues a step: `rules.IssueRules`
[constants]    what it adds to kernels: `cost.operators.FrameworkConstants`
[switches]     keys of `[parallel]` that it can have other than their default, and how one tells it
[dispatchers]  ways in which it sends tokens, beside the plain one, and how one tells it
[[release]]    what single releases change: `rules.ReleaseChange`
[[environment]], [[not_modelled]], [[user_buffers]]    what advice for a launch needs: `planners.megatron`

Switches that are in no file, all frameworks have: experts that tensor parallelism leaves whole are in all that cut
experts, torchtitan (`expert_tensor_parallel_degree` 1) and DeepSpeed (`enable_expert_tensor_parallelism`, by default
off). DeepEP and HybridEP are in Megatron-Core and torchtitan. DeepSpeed drops tokens too (`drop_tokens`), but its
kernels are not modelled. PyTorch documents whole-network capture for DDP, not for FSDP.
"""

import tomllib
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final

from lagom_overlap.errors import UnknownNameError
from lagom_overlap.toml_tables import from_table
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel.layout import (
    Dispatcher,
    ParallelLayout,
    PipelineSchedule,
    Recompute,
    RecomputeModule,
)

TAKEN_ANYWHERE: Final = ("overlap_gradients", "prefetch")
"""Keys that a job of another framework may give all the same: they say how its units are issued, by whatever hook."""


@cache
def switches() -> Mapping[str, Mapping[str, str]]:
    """Keys of `[parallel]`: the frameworks in which they can be other than their default, and how one tells them.

    "": by no one switch.
    """
    by_key: dict[str, dict[str, str]] = defaultdict(dict)
    for name in framework_names():
        for key, switch in framework_file(name).switches.items():
            by_key[key][name] = switch
    return dict(by_key)


@cache
def dispatchers() -> Mapping[Dispatcher, Mapping[str, str]]:
    """The same of the ways in which tokens are sent."""
    by_way: dict[Dispatcher, dict[str, str]] = defaultdict(dict)
    for name in framework_names():
        for way, switch in framework_file(name).dispatchers.items():
            by_way[Dispatcher(way)][name] = switch
    return dict(by_way)


def has_switch(framework: str, key: str) -> bool:
    """Whether the framework can do what the key says."""
    return framework in switches().get(key, (framework,))


def can_overlap_experts(model: TransformerModel, layout: ParallelLayout) -> bool:
    """Whether Megatron-LM runs all-to-alls behind another micro-batch: of a pipeline, with virtual stages only.

    Nor where whole layers, or mixtures, are computed again, with more than one multi-token prediction, or with Mamba's
    layers. NVIDIA/Megatron-LM at d98e8a64, `core/transformer/transformer_config.py`; `core/models`: of all models
    `GPTModel` alone has a `build_schedule_plan`.
    """
    if model.mamba is not None or model.mtp_layers > 1:
        return False
    is_interleaved = layout.pipeline == 1 or layout.schedule is PipelineSchedule.INTERLEAVED
    makes_again = layout.recompute is Recompute.FULL or RecomputeModule.MOE in layout.recompute_modules
    return layout.expert > 1 and layout.num_micro_batches > 1 and is_interleaved and not makes_again


def has_dispatcher(framework: str, dispatcher: Dispatcher) -> bool:
    """Whether the framework sends tokens that way."""
    return framework in dispatchers().get(dispatcher, (framework,))


_Tables = dict[str, Any]  # any TOML value


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkFile:
    """The tables of a framework, those of the one that it extends merged in; whoever needs one decodes it."""

    rules: _Tables
    constants: _Tables
    title: str | None = None
    switches: dict[str, str] = field(default_factory=dict)
    dispatchers: dict[str, str] = field(default_factory=dict)
    release: list[_Tables] = field(default_factory=list)
    environment: list[_Tables] = field(default_factory=list)
    not_modelled: list[_Tables] = field(default_factory=list)
    user_buffers: list[_Tables] = field(default_factory=list)


def _folder() -> Traversable:
    return resources.files("lagom_overlap.frameworks")


@cache
def framework_names() -> tuple[str, ...]:
    """The names that `framework_file` knows, sorted."""
    return tuple(
        sorted(entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name[-5:] == ".toml")
    )


@cache
def framework_file(name: str) -> FrameworkFile:
    """The file of the framework of that name.

    Raises:
        UnknownNameError: if there is none.
    """
    return from_table(_merged(name), FrameworkFile, f"frameworks/{name}.toml")


def _merged(name: str) -> _Tables:
    if name not in framework_names():
        raise UnknownNameError.among("framework", name, list(framework_names()))
    own = tomllib.loads((_folder() / f"{name}.toml").read_text(encoding="utf-8"))
    extended = own.pop("extends", None)
    if extended is None:
        return own
    base = _merged(extended)
    base.pop("title", None)
    return over(base, own)


def over(base: _Tables, own: _Tables) -> _Tables:
    """The tables of `base` with what `own` says in their place, table in table."""
    merged = deepcopy(base)
    for key, value in own.items():
        is_inner = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = over(merged[key], value) if is_inner else value
    return merged
