"""Runs a random program as a job would, and notes all that came of it: losses, gradients, parameters, exceptions."""

import atexit
import contextlib
import copy
import hashlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from calls import Calls, drawn_numbers, words
from models import KEPT_GROUPS, WIDTH, Layers, Stages, made, register, width_of
from programs import Program
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset
from unequal import Unequal

ERRORS = {
    error.__name__: error for error in (ValueError, ArithmeticError, KeyboardInterrupt, StopIteration, RuntimeError)
}
ROWS = 12
Record = tuple[str, Any]


class Watch(Protocol):
    """How a job is run: alone, or with one of our tools."""

    def on_model(self, model: nn.Module, optimizer: Any) -> None:
        """The model is made."""

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Around each step."""

    def extra_step(self) -> contextlib.AbstractContextManager[None]:
        """Around a step that this rank makes and others do not."""

    def close(self) -> None:
        """The job ends, or wants no more of it."""

    def end(self) -> None:
        """The job has ended on all ranks, and another one follows in the same process groups."""


class Stock:
    """The job alone."""

    stats: dict[str, Any] = {}  # noqa: RUF012 - of a job alone there is nothing to say

    def on_model(self, model: nn.Module, optimizer: Any) -> None:
        pass

    def step(self, number: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def extra_step(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def close(self) -> None:
        pass

    def end(self) -> None:
        pass


class Job:
    """A program under way; `records` is what came of it so far."""

    def __init__(self, program: Program, watch: Watch, folder: Path) -> None:
        self.program, self.watch, self.folder = program, watch, folder
        self.records: list[Record] = []

    def run(self) -> None:
        """All of it; what it raises is raised."""
        program = self.program
        torch.manual_seed(program.seed)
        self.calls = Calls(program)
        self.models: list[nn.Module] = []
        self.stages: Stages | None = None
        if program.family == "pipeline":
            self.stages = Stages(program)
            self.models = [self.stages.parts]
        else:
            self.models = [made(program)]
            if program.has("second_model"):
                self.models.append(made(program))
        self.optimizers = [self._optimizer(model) for model in self.models]
        self.watch.on_model(self.models[0], self.optimizers[0])
        self._add_hooks()
        self.unequal = Unequal(program, self._note)
        self.saved: Any = None
        try:
            with contextlib.ExitStack() as stack:
                if program.has("anomaly"):
                    stack.enter_context(torch.autograd.set_detect_anomaly(True))
                loader = program.get("loader")
                self._batches = self._loaded(loader[0]) if loader is not None else None
                stack.enter_context(self.unequal.joined(self.models[0]))
                for number in range(self.unequal.num_steps):
                    if self.unequal.has_left(number):
                        break
                    self._one(number)
        finally:
            for number, model in enumerate(self.models):
                self._note(f"parameters of model {number}", [parameter.detach() for parameter in model.parameters()])
                self._note(f"buffers of model {number}", list(model.buffers()))

    def _note(self, label: str, value: Any) -> None:
        self.records.append((label, bits(value)))

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            parameters = list(model.parameters())
        return (
            torch.optim.AdamW(parameters, lr=1e-3) if self.program.has("adam") else torch.optim.SGD(parameters, lr=0.05)
        )

    def _layers(self) -> Iterator[Layers]:
        for model in self.models:
            for module in model.modules():
                if isinstance(module, Layers):
                    yield module

    # Steps. -----------------------------------------------------------------------------------------------------------

    def _one(self, number: int) -> None:
        """A step, and what is done after it."""
        raised = self.unequal.raises()
        is_raising = raised is not None and raised[0] == number
        if self.program.get("close") == (number,):
            self.watch.close()
        if self.program.get("disable") == (number,):
            os.environ["LAGOM_DISABLE"] = "1"
        profiled = self.program.get("profile")
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.unequal.mode(number))
            if profiled is not None and profiled[0] == number:
                stack.enter_context(profile(activities=[ProfilerActivity.CPU]))
            if not is_raising:
                with self.watch.step(number):
                    self._train(number)
            elif raised[3] == "outside":
                try:
                    with self.watch.step(number):
                        self._train(number, raised)
                except BaseException as error:
                    self._caught(number, error, raised)
            else:
                with self.watch.step(number):
                    try:
                        self._train(number, raised)
                    except BaseException as error:
                        if raised[3] == "not":
                            raise
                        self._caught(number, error, raised)
        self._between(number)

    def _caught(self, number: int, error: BaseException, raised: tuple[Any, ...]) -> None:
        self._note(f"step {number}: caught", words(error))
        for layers in self._layers():
            layers.raises = None
        for model in self.models:
            if raised[4] == "resets" and isinstance(model, FSDPModule) and hasattr(model, "reset_iter_state"):
                model.reset_iter_state()
        self._note(f"step {number}: gradients after it", self._gradients())
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _train(self, number: int, raised: tuple[Any, ...] | None = None) -> None:
        program = self.program
        where = raised[1] if raised is not None else ""
        error = ERRORS[raised[2]](f"in {where} of step {number}") if raised is not None else None
        which = number % len(self.models)
        model, optimizer = self.models[which], self.optimizers[which]
        for layers in self._layers():
            layers.step = number
            if hasattr(layers.b, "step"):
                layers.b.step = number  # type: ignore[union-attr]
        self.unequal.at("before", number)
        self._note(f"step {number}: calls before", self.calls.run(number, "before"))
        unshard = program.get("unshard")
        if unshard is not None and isinstance(model, FSDPModule):
            layer = getattr(model, unshard[0])
            if isinstance(layer, FSDPModule):
                handle = layer.unshard(async_op=unshard[1])
                if handle is not None:
                    handle.wait()
        with contextlib.ExitStack() as stack:
            if error is not None:
                stack.enter_context(self._raising(model, optimizer, where, error))
            self._passes(number, model, error if where == "loss" else None)
            if program.has("clip"):
                parameters = [p for p in model.parameters() if p.grad is not None]
                # Sharded and plain ones have no norm in common.
                parameters = [p for p in parameters if type(p) is type(parameters[0])]
                if parameters:
                    self._note(
                        f"step {number}: norm", torch.nn.utils.clip_grad_norm_(parameters, program.get("clip")[0])
                    )
            self._note(f"step {number}: gradients", self._gradients())
            skips = program.get("no_update")
            if skips is None or number % skips[0]:
                if not program.has("optimizer_in_backward"):
                    self.unequal.update(number, optimizer)
                optimizer.zero_grad(set_to_none=not program.has("keep_grads"))
            self.unequal.at("after", number)
            self._note(f"step {number}: calls after", self.calls.run(number, "after"))
            if where == "between" and error is not None:
                raise error

    def _passes(self, number: int, model: nn.Module, error: BaseException | None) -> None:
        program = self.program
        if self.stages is not None:
            x = self._batch(number, 0, rows=2 * self.stages.num_micro)
            self._note(f"step {number}: loss", self.stages.run(x))
            return
        if program.family == "calls":
            x = self._batch(number, 0)
            loss = model(x).square().mean()
            loss.backward()
            self._note(f"step {number}: loss", loss.item())
            return
        count, syncs = program.get("accumulate") or (1, "last")
        joins = program.get("join")
        if joins is not None and isinstance(model, DistributedDataParallel):
            with model.join(divide_by_initial_world_size=joins[0]):
                for batch in range(count + dist.get_rank() % 2):
                    self._backward(number, batch, model, error)
            return
        for batch in range(count):
            is_synced = {"last": batch + 1 == count, "all": True, "odd": batch % 2 == 1 or count == 1}[syncs]
            is_synced &= not self.unequal.is_alone(number)
            with contextlib.ExitStack() as stack:
                if isinstance(model, DistributedDataParallel) and not is_synced:
                    stack.enter_context(model.no_sync())
                elif isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(is_synced)
                    model.set_is_last_backward(batch + 1 == count)
                self._backward(number, batch, model, error)
        if program.family == "moe" and not isinstance(model, (FSDPModule, DistributedDataParallel)):
            for layer in (model.a, model.c):
                for parameter in layer.parameters():  # type: ignore[union-attr]
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad)

    def _backward(self, number: int, batch: int, model: nn.Module, error: BaseException | None) -> None:
        x = self._batch(number, batch)
        if self.program.has("two_losses"):
            loss = model(x).square().mean() + model(x.roll(1, 0)).abs().mean()
        else:
            loss = model(x).float().square().mean()
        if batch == 0:
            self._note(f"step {number}: calls within", self.calls.run(number, "within"))
        if error is not None:
            raise error
        if loss.requires_grad:
            if self.program.has("retain"):
                loss.backward(retain_graph=True)
            self.unequal.loss(loss).backward()
        self._note(f"step {number}: loss of batch {batch}", loss.item())
        self.unequal.at("micro", number)

    def _batch(self, number: int, batch: int, rows: int = ROWS) -> torch.Tensor:
        if self._batches is not None and batch == 0:
            return next(self._batches)[0]
        seed = 1000 * number + 100 * batch + dist.get_rank()
        return drawn_numbers(seed, rows, width_of(self.program))

    def _loaded(self, num_workers: int) -> Generator[Any, None, None]:
        data = drawn_numbers(dist.get_rank(), ROWS * 4, width_of(self.program))
        while True:
            loader = DataLoader(TensorDataset(data), batch_size=ROWS, num_workers=num_workers)
            yield from loader

    def _gradients(self) -> list[Any]:
        return [[parameter.grad for parameter in model.parameters()] for model in self.models]

    # What raises. -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _raising(self, model: nn.Module, optimizer: Any, where: str, error: BaseException) -> Iterator[None]:
        def fail(*_: Any) -> None:
            raise error

        layers = next((module for module in model.modules() if isinstance(module, Layers)), None)
        handles: list[Any] = []
        if layers is not None:
            match where:
                case "forward":
                    handles.append(layers.b.register_forward_pre_hook(fail))
                case "hook":
                    handles.append(layers.a.register_forward_hook(fail))
                case "backward":
                    layers.raises = error
                case "post":
                    parameter = next((p for p in layers.c.parameters() if p.requires_grad), None)
                    if parameter is not None:
                        handles.append(parameter.register_post_accumulate_grad_hook(fail))
        if where == "optimizer":
            handles.append(optimizer.register_step_pre_hook(fail))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if layers is not None:
                layers.raises = None

    def _add_hooks(self) -> None:  # noqa: PLR0912 - one branch a feature
        program = self.program
        self._handles: list[Any] = []
        model = self.models[0]
        layers = next((module for module in model.modules() if isinstance(module, Layers)), None)
        if layers is None:
            return
        if program.has("optimizer_in_backward"):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(_update))
        seen = self.records
        # Such gradients are under way to other ranks while hooks run: what is seen is a matter of luck.
        sees = ("ddp", "gradient_as_bucket_view", True) not in program.features

        def look(*_: Any) -> None:
            found = [parameter.grad for parameter in model.parameters()] if sees else None
            seen.append(("seen in backward", bits(found)))

        for (kind,) in program.all("hook"):
            match kind:
                case "full_backward":
                    self._handles.append(layers.a.register_full_backward_hook(look))
                case "full_backward_pre":
                    self._handles.append(layers.a.register_full_backward_pre_hook(look))
                case "tensor":

                    def hook_output(_module: Any, _x: Any, y: torch.Tensor) -> None:
                        if y.requires_grad:  # it sees its own gradient; for others see the FSDP2 adapter's limits
                            y.register_hook(lambda gradient: seen.append(("seen in backward", bits(gradient))))

                    self._handles.append(layers.a.register_forward_hook(hook_output))
                case "post":
                    for parameter in layers.b.parameters():
                        if parameter.requires_grad:
                            self._handles.append(parameter.register_post_accumulate_grad_hook(look))
                case _:
                    self._handles.append(nn.modules.module.register_module_full_backward_hook(look))
        compiled = program.get("compile")
        if compiled is not None:
            getattr(layers, compiled[0]).compile(backend=compiled[1])

    def end(self) -> None:
        """What a job that goes on in the same process has to take back."""
        for handle in getattr(self, "_handles", ()):
            handle.remove()
        if (batches := getattr(self, "_batches", None)) is not None:
            batches.close()  # left to the garbage collector, each worker is waited for twice 5 s: its queue goes first
        os.environ.pop("LAGOM_DISABLE", None)
        if self.program.has("compile"):
            torch._dynamo.reset()

    # Between steps. ---------------------------------------------------------------------------------------------------

    def _between(self, number: int) -> None:  # noqa: PLR0912 - one branch a feature
        program = self.program
        self.unequal.at("between", number)
        self.unequal.extra_steps(number, self.models[0], self.optimizers[0], self.watch.extra_step)
        for every, how, weights in program.all("evaluate"):
            if number % every == 0:
                self._evaluate(number, how, weights)
        for first, second, how in program.all("checkpoint"):
            if number == first:
                self.saved = self._save(how)
            elif number == second and self.saved is not None:
                self._load(how, self.saved)
        if (frozen := program.get("frozen_from")) is not None and frozen[1] == number:
            for layers in self._layers():
                getattr(layers, frozen[0]).requires_grad_(False)
        if program.get("pickle") == (number,):
            torch.save(self.models[0], io.BytesIO())
            copy.deepcopy(getattr(self.models[0], "module", self.models[0]))
        hook = program.get("comm_hook")
        if hook is not None and hook[1] and hook[1] == number:
            register(self.models[0], hook[0])
        if (group := program.get("group")) is not None:
            if number == group[0]:
                self._group = dist.new_group(list(range(dist.get_world_size())))
            if group[0] <= number < group[1]:
                x = torch.full((2304,), 1.5 + dist.get_rank())
                dist.all_reduce(x, group=self._group)
                self._note(f"step {number}: in the new group", x)
            if number == group[1]:
                dist.destroy_process_group(self._group)
        if (forks := program.get("fork")) is not None and forks[0] == number:
            self._fork(forks[1])

    def _evaluate(self, number: int, how: str, weights: str) -> None:
        if self.stages is not None:
            return
        contexts = {
            "no_grad": torch.no_grad,
            "eval": torch.no_grad,
            "inference_mode": torch.inference_mode,
            "set_grad_enabled": lambda: torch.set_grad_enabled(False),
        }
        for model in self.models:
            self._reshard(model)
            own = [parameter.detach().clone() for parameter in model.parameters()]
            if weights == "average":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
            model.train(how != "eval")
            with contexts[how]():
                found = model(self._batch(10_000 + number, 1)).float().square().mean().item()
            model.train()
            self._reshard(model)
            if weights == "average":
                with torch.no_grad():
                    for parameter, value in zip(model.parameters(), own, strict=True):
                        parameter.copy_(value)
            self._note(f"step {number}: evaluation", found)

    def _reshard(self, model: nn.Module) -> None:
        """Where forward leaves gathered parameters by design: shards are changed. Else D1 would be hidden."""
        for module in model.modules() if self.program.has("reshard") else ():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _save(self, how: str) -> Any:
        model = self.models[0]
        match how:
            case "state":
                return {name: value.clone() for name, value in model.state_dict().items()}
            case "file":
                torch.save(model.state_dict(), self.folder / f"{dist.get_rank()}.pt")
                return True
            case "dcp":
                dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=self.folder / "dcp")
                return True
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def _load(self, how: str, saved: Any) -> None:
        model = self.models[0]
        match how:
            case "state":
                model.load_state_dict(saved)
            case "file":
                model.load_state_dict(torch.load(self.folder / f"{dist.get_rank()}.pt", weights_only=False))
            case "dcp":
                state = {"model": get_model_state_dict(model)}
                dcp.load(state, checkpoint_id=self.folder / "dcp")
                set_model_state_dict(model, state["model"])
            case _:
                set_model_state_dict(
                    model, saved, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                )

    def _fork(self, how: str) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                if how != "leaves":
                    atexit._run_exitfuncs()
            finally:
                os._exit(0)
        _, status = os.waitpid(pid, 0)
        self._note("a child", os.waitstatus_to_exitcode(status))


def _update(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.05)
    parameter.grad = None


def bits(value: Any) -> Any:
    """Tensors as what they hold on this rank: numbers where they are few, else a digest of all their bits."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        local = local.detach().contiguous().flatten().cpu()
        if local.numel() <= 2:
            return repr(local.tolist())
        return hashlib.blake2b(local.view(torch.uint8).numpy(), digest_size=8).hexdigest()
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"0x[0-9a-f]+|/tmp/\S+|\[[FEWI]\d{4} [\d:.]+ ", "…", value)
    return repr(value) if isinstance(value, float) else value


_FOLDERS: list[Path] = []
"""Of the last run."""


def run(program: Program, watch: Watch, *, catches: bool = True, records: list[Record] | None = None) -> list[Record]:
    """What came of a program, put into `records`; an exception that it does not catch is the last of it."""
    shared: list[Any] = [tempfile.mkdtemp(prefix="job") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    while _FOLDERS:  # all ranks have left it
        shutil.rmtree(_FOLDERS.pop(), ignore_errors=True)
    _FOLDERS.append(folder)
    groups = set(dist.distributed_c10d._world.pg_map)
    job = Job(program, watch, folder)
    job.records = [] if records is None else records
    try:
        job.run()
    except BaseException as error:
        if not catches:
            raise
        job.records.append(("raised", bits(words(error))))
    finally:
        watch.close()
        job.end()
        if catches:
            watch.end()
            for group in [g for g in dist.distributed_c10d._world.pg_map if g not in groups]:
                if group.group_name not in KEPT_GROUPS:
                    dist.destroy_process_group(group)
    return job.records


__all__ = ["WIDTH", "Job", "Stock", "Watch", "bits", "run"]
