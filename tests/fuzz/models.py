"""The models of random programs: layers in any order, sharded, replicated, split, routed to experts, or in stages."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from programs import Program
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

WIDTH = 48
"""Of a layer: 9 KiB of weights, which 2, 3 and 4 ranks divide evenly."""
WIDE = 516
"""More than 1 MiB: gloo's ring cuts such a message into segments."""


KEPT_GROUPS: set[str] = set()
"""The groups of meshes: DTensor keeps meshes in its caches, and finds no groups in them once those are destroyed."""


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    before = set(dist.distributed_c10d._world.pg_map)
    mesh = init_device_mesh(torch.get_default_device().type, shape, mesh_dim_names=names)
    for name in names:
        mesh[name].get_group()
    KEPT_GROUPS.update(group.group_name for group in dist.distributed_c10d._world.pg_map if group not in before)
    return mesh


class Raising(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException) -> torch.Tensor:
        # Not the exception itself: its traceback holds this graph, a circle through C++ that Python could not collect.
        ctx.error = type(error), error.args
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        kind, words = ctx.error
        raise kind(*words)


def width_of(program: Program) -> int:
    return WIDE if program.has("wide") else WIDTH


class Layers(nn.Module):
    """Layers a, b and c, run in the order of the step."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.step = 0
        self.raises: BaseException | None = None
        self._orders = program.get("order") or ("abc",)
        self._recompute = program.get("recompute") or ("", "not")
        self._dropout = (program.get("dropout") or (0.0,))[0]
        width = width_of(program)
        for name in "abc":
            setattr(self, name, _layer(program, name, width))
        if program.has("odd"):  # sizes that ranks do not divide, and one for the root
            self.scale = nn.Parameter(torch.ones(width))
            self.a = nn.Sequential(nn.Linear(width, 7), nn.Linear(7, width, bias=False))
        if (shared := program.get("shared")) and all(isinstance(getattr(self, name), nn.Linear) for name in shared):
            getattr(self, shared[1]).weight = getattr(self, shared[0]).weight
        for (name,) in program.all("frozen"):
            getattr(self, name).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._recompute[0] == "all":
            return checkpoint(self._run, x, use_reentrant=self._recompute[1] == "reentrant")
        return self._run(x)

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        for name in self._orders[self.step % len(self._orders)]:
            layer = getattr(self, name)
            if name == self._recompute[0]:
                y = checkpoint(layer, x, use_reentrant=self._recompute[1] == "reentrant")
            else:
                y = layer(x)
            if self.raises is not None and name == "b":
                y = Raising.apply(y, self.raises)
            x = x + nn.functional.dropout(y.tanh(), self._dropout, self.training)
        return x * self.scale if hasattr(self, "scale") else x


def _layer(program: Program, name: str, width: int) -> nn.Module:
    if program.family == "moe" and name == "b":
        return Experts(program, width)
    if program.family == "tp":
        return Block(width)
    layer: nn.Module = nn.Linear(width, width)
    if program.has("nested") and program.get("nested") == (name,):
        layer = nn.Sequential(nn.Linear(width, width), nn.Sequential(nn.Linear(width, width // 4), nn.Tanh()))
        layer.append(nn.Linear(width // 4, width))
    norm = program.get("norm")
    if norm is not None and norm[0] == name:
        layer = nn.Sequential(layer, nn.LayerNorm(width) if norm[1] == "layer" else nn.BatchNorm1d(width))
    return layer


class Block(nn.Module):
    """What tensor parallelism splits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


class Exchange(torch.autograd.Function):
    """Rows go to other ranks, and their gradients come back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, arriving: list[int] | None, leaving: list[int] | None) -> torch.Tensor:
        ctx.splits = leaving, arriving
        rows = x.size(0) if arriving is None else sum(arriving)
        out = x.new_empty(rows, *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), arriving, leaving)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        arriving, leaving = ctx.splits
        gradient = gradients[0].contiguous()
        rows = gradient.size(0) if arriving is None else sum(arriving)
        out = gradient.new_empty(rows, *gradient.shape[1:])
        work = dist.all_to_all_single(out, gradient, arriving, leaving, async_op=True)
        work.wait()
        return out, None, None


class Experts(nn.Module):
    """One expert on each rank; who gets how many rows is drawn anew in every step."""

    def __init__(self, program: Program, width: int) -> None:
        super().__init__()
        self._splits = (program.get("splits") or ("even",))[0]
        self._is_overlapped = program.has("overlapped")
        self._seed = program.seed
        self.step = 0
        self.expert = nn.Linear(width, width)
        self.beside = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        leaving, arriving = self._counts(x.size(0))
        moved = Exchange.apply(x, arriving, leaving)
        beside = self.beside(x) if self._is_overlapped else x
        return beside + Exchange.apply(self.expert(moved).relu(), leaving, arriving)

    def _counts(self, rows: int) -> tuple[list[int] | None, list[int] | None]:
        n, rank = dist.get_world_size(), dist.get_rank()
        if self._splits == "even" and rows % n == 0:
            return None, None
        generator = torch.Generator("cpu").manual_seed(self._seed + self.step)
        weights = torch.rand(n, n, generator=generator, device="cpu")
        if self._splits == "some empty":
            weights = weights * (torch.rand(n, n, generator=generator, device="cpu") > 0.5)
        counts = (weights / weights.sum(1, keepdim=True).clamp(min=1e-6) * rows).long()
        counts[:, 0] += rows - counts.sum(1)
        return counts[rank].tolist(), counts[:, rank].tolist()


def made(program: Program) -> nn.Module:
    """The model of a family; `pipeline` has `Stages`."""
    match program.family:
        case "fsdp2":
            return sharded(program, Layers(program), None)
        case "hsdp":
            shape = program.get("mesh") or (1, dist.get_world_size())
            mesh = mesh_of(shape, ("replicate", "shard"))
            return sharded(program, Layers(program), mesh)
        case "ddp":
            return replicated(program, Layers(program))
        case "tp":
            return split(program)
        case "moe":
            return with_experts(program)
    return Layers(program)


def sharded(program: Program, model: nn.Module, mesh: Any, ignored: set[nn.Parameter] | None = None) -> nn.Module:  # noqa: PLR0912 - one branch a feature
    how: dict[str, Any] = {}
    if (mixed := program.get("mixed")) is not None:
        how["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=getattr(torch, mixed[0]),
            reduce_dtype=getattr(torch, mixed[1]) if mixed[1] else None,
            output_dtype=torch.float32 if mixed[2] else None,
        )
    if mesh is not None:
        how["mesh"] = mesh
    if (placement := program.get("placement")) is not None:
        how["shard_placement_fn"] = lambda parameter: Shard(placement[0]) if parameter.ndim > 1 else None
    for (name,) in program.all("ignored"):
        ignored = (ignored or set()) | set(getattr(model, name).parameters())
    reshard = program.get("reshard")

    def shard(module: Any, number: int) -> Any:
        more = (
            {}
            if reshard is None
            else {"reshard_after_forward": number % 2 == 0 if reshard[0] == "alternating" else reshard[0]}
        )
        if ignored:
            more["ignored_params"] = ignored
        return fully_shard(module, **how, **more)

    which = (program.get("sharded") or ("abc",))[0]
    if which == "together":
        shard([model.a, model.b], 0)
    else:
        for number, name in enumerate(which):
            layer = getattr(model, name)
            if isinstance(layer, Experts):
                continue
            if isinstance(layer, nn.Sequential) and program.get("nested") == (name,):
                shard(layer[0], number)
            shard(layer, number)
    shard(model, 0)
    for name, method, *arguments in program.all("method"):
        target = getattr(model, name) if name else model
        if hasattr(target, method):
            getattr(target, method)(*arguments)
    for direction, one, other in program.all("prefetch"):
        method = f"set_modules_to_{direction}_prefetch"
        if hasattr(getattr(model, one), method) and hasattr(getattr(model, other), method):
            getattr(getattr(model, one), method)([getattr(model, other)])
    return model


def replicated(program: Program, model: nn.Module, **how: Any) -> nn.Module:
    how = {"bucket_cap_mb": 0.01} | dict(program.all("ddp")) | how
    ddp = DistributedDataParallel(model, **how)
    hook = program.get("comm_hook")
    if hook is not None and not hook[1]:
        register(ddp, hook[0])
    return ddp


def register(model: nn.Module, name: str) -> None:
    """A communication hook of DDP's."""
    assert isinstance(model, DistributedDataParallel)
    match name:
        case "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        case "bf16":
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        case "noop":
            model.register_comm_hook(None, _as_it_is)
        case "powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        case "builtin":
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        case _:
            model.register_comm_hook(None, _negated)


def _as_it_is(_state: None, bucket: dist.GradBucket) -> Any:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _negated(_state: None, bucket: dist.GradBucket) -> Any:
    work = dist.all_reduce(bucket.buffer().neg_(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def split(program: Program) -> nn.Module:
    """Blocks split over a mesh's second dimension and sharded over its first."""
    mesh = mesh_of(program.get("mesh") or (1, dist.get_world_size()), ("dp", "tp"))
    model = Layers(program)
    plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if program.has("sequence"):
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
    for name in "abc":
        block = getattr(model, name)
        parallelize_module(block, mesh["tp"], plan)
        if mesh["dp"].size() > 1:
            fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]) if mesh["dp"].size() > 1 else model


def with_experts(program: Program) -> nn.Module:
    model = Layers(program)
    experts = set(model.b.parameters())
    match (program.get("dense") or ("fsdp2",))[0]:
        case "fsdp2":
            return sharded(program, model, None, experts)
        case "ddp":
            names = [f"b.{name}" for name, _ in model.b.named_parameters()]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
            return replicated(program, model)
    return model


class Stages:
    """A rank's part of a pipeline."""

    def __init__(self, program: Program) -> None:
        kind, num_rounds = program.get("schedule") or ("GPipe", 1)
        n = dist.get_world_size()
        dp = program.get("dp") if n == 4 else None
        mesh = mesh_of((n // 2, 2) if dp else (n, 1), ("pp", "dp"))
        group, rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
        num_ranks = mesh["pp"].size()
        per_rank = 2 if kind == "Interleaved1F1B" else 1
        self.parts = nn.ModuleList()
        stages = []
        for number in range(per_rank):
            index = rank + number * num_ranks
            torch.manual_seed(index)
            part: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
            if dp == ("fsdp2",):
                part = fully_shard(part, mesh=mesh["dp"])
            elif dp == ("ddp",):
                part = DistributedDataParallel(part, process_group=mesh["dp"].get_group())
            self.parts.append(part)
            stages.append(PipelineStage(part, index, per_rank * num_ranks, torch.get_default_device(), group=group))
        loss: Callable[..., torch.Tensor] = nn.functional.mse_loss
        self.num_micro = num_ranks * num_rounds
        self.is_first, self.is_last = rank == 0, rank == num_ranks - 1
        if per_rank > 1:
            self.schedule: Any = ScheduleInterleaved1F1B(stages, self.num_micro, loss_fn=loss)
        else:
            made_by = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[kind]
            self.schedule = made_by(stages[0], self.num_micro, loss_fn=loss)

    def run(self, x: torch.Tensor) -> float:
        losses: list[torch.Tensor] = []
        arguments = (x,) if self.is_first else ()
        if self.is_last:
            self.schedule.step(*arguments, target=x.roll(1), losses=losses)
        else:
            self.schedule.step(*arguments)
        return float(sum(loss.item() for loss in losses))
