"""Parallelism of a `Decoder`: tensor and sequence (DTensor), experts, FSDP2, HSDP, replication; its optimizers.

Units of sharding are the embedding, each layer, and the last norm with the head, as torchtitan groups them; tied
embeddings stay in the root's unit. Gathers are bf16, reductions fp32.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lagom_overlap.capturing.models.decoder import Decoder, Layer
from lagom_overlap.capturing.models.degrees import Degrees
from lagom_overlap.capturing.models.experts import RoutedExperts

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters have this type; a module of fake tensors cannot be converted later."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def data_mesh(degrees: Degrees) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The mesh of data parallelism (one or two dimensions), and that of tensor parallelism, None where degree 1."""
    names = {"replicate": degrees.replicate, "fsdp": degrees.fsdp, "tp": degrees.tensor}
    sizes = {name: size for name, size in names.items() if size > 1}
    if not sizes:
        return None, None
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    data = tuple(name for name in ("replicate", "fsdp") if name in sizes)
    return (mesh[data] if data else None), (mesh["tp"] if "tp" in sizes else None)


def _layer_plan(layer: Layer, *, sequence: bool) -> dict[str, ParallelStyle]:
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    rows = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    attention, mlp = ("side.attention", "side.mlp") if layer.side is not None else ("attention", "mlp")
    plan: dict[str, ParallelStyle] = {
        **{f"{attention}.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        f"{attention}.out": rows,
        f"{mlp}.up": ColwiseParallel(),
        f"{mlp}.gate": ColwiseParallel(),
        f"{mlp}.down": rows,
    }
    if sequence:
        plan |= {"norm": SequenceParallel(), **({"side": gather} if layer.side is not None else {})}
        if layer.side is None:
            plan |= {"norm_2": SequenceParallel(), "attention": gather, "mlp": gather}
    return {name: style for name, style in plan.items() if _has(layer, name)}


def _has(module: nn.Module, name: str) -> bool:
    current: object = module
    for part in name.split("."):
        current = getattr(current, part, None)
    return isinstance(current, nn.Module)


def apply_tensor(decoder: Decoder, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Tensor parallelism as Megatron cuts it; with `sequence` the norms work on a share of the sequence."""
    outside = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {}
    if decoder.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=outside)
    if decoder.head is not None:
        if sequence:
            plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=outside, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(decoder, mesh, plan)
    for layer in decoder.layers.values():
        assert isinstance(layer, Layer)
        parallelize_module(layer, mesh, _layer_plan(layer, sequence=sequence))


def spread_experts(model: nn.Module, degrees: Degrees) -> set[nn.Parameter]:
    """Expert parallelism; the experts' parameters that no other rank shares, for FSDP to leave alone."""
    if degrees.expert == 1:
        return set()
    shared = degrees.replicate * degrees.fsdp // degrees.expert
    mesh = init_device_mesh("cpu", (shared, degrees.expert), mesh_dim_names=("expert_fsdp", "ep"))
    alone: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            with default_dtype(torch.float32 if shared > 1 else torch.bfloat16):
                module.spread_over(mesh["ep"].get_group())
            if shared > 1:
                fully_shard(module.local, mesh=mesh["expert_fsdp"], mp_policy=POLICY)
            else:
                alone.update(module.local.parameters())
    return alone


def apply_data(
    model: nn.Module,
    units: Iterable[nn.Module | list[nn.Module]],
    mesh: DeviceMesh | None,
    degrees: Degrees,
    alone: set[nn.Parameter],
) -> None:
    """FSDP2 over `units` and the rest of the model; replication alone where nothing is sharded."""
    if mesh is None:
        return
    for unit in (*units, model):
        if degrees.fsdp == 1:
            for module in unit if isinstance(unit, list) else [unit]:
                replicate(module, mesh=mesh, mp_policy=POLICY)
        else:
            fully_shard(unit, mesh=mesh, mp_policy=POLICY, ignored_params=alone)


def decoder_units(decoder: Decoder, *, tied: bool) -> list[nn.Module | list[nn.Module]]:
    """What is gathered together."""
    units: list[nn.Module | list[nn.Module]] = list(decoder.layers.values())
    if not tied:
        units += [decoder.embedding] if decoder.embedding is not None else []
        units += [[decoder.norm, decoder.head]] if decoder.norm is not None and decoder.head is not None else []
    return units


def optimizers_of(model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    """AdamW in its multi-tensor form (the default on GPUs), one for the parameters of each device mesh."""
    of_mesh: defaultdict[object, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        of_mesh[mesh].append(parameter)
    return tuple(torch.optim.AdamW(parameters, lr=1e-4, foreach=True) for parameters in of_mesh.values())
