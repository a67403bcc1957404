"""Which model a job trains and where its steps begin, for jobs that do not say so.

The model: the first module called with gradients on that has parameters to train and, where the route needs an adapter
(gloo), is, or holds, an FSDP2 module or is DDP. Below a tuner plug-in any framework will do. A hook on all modules
finds it and removes itself before that call goes on, so later calls cost nothing and a compiled model sees no hook.

A step begins with the first call of the model after its optimizer has worked since the last beginning: several
forwards of gradient accumulation are one step, chained optimizers count once, and a step whose update was skipped joins
the next one. An optimizer of other parameters counts only where there is none of the model's own: Megatron's and
DeepSpeed's work on copies. A loop without any optimizer step never
begins a second one: nothing is measured then, and nothing is changed.

Each rank counts by itself, and ranks may come to count differently. What a collective gets never depends on it.

In a pipeline the later stages receive what the earlier ones send before their model is called: a first stage that
waited in its own call for the others to agree on a step would wait for good. There a step begins with the first update
after a call of the model: all ranks come to it, none needs the others' next step for it.

Within `torch.compile` hooks are traced into the graph, where they must not call us: with `fullgraph=True` that would
end the job. All that they do there is to store the module, which dynamo replays after the graph; nothing is read, so
nothing is guarded. The next optimizer's step finds it, and begins the next step at once, since the forward cannot.
"""

import gc
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

_log = logging.getLogger(__name__)

_STAGES: Final = (
    ("torch.distributed.pipelining.stage", "_PipelineStageBase"),
    ("deepspeed.runtime.pipe.engine", "PipelineEngine"),
)
"""What holds a stage of a pipeline, by module; Megatron-Core counts its stages itself."""


class TrainingSteps:
    """Calls `on_model(model)` once, then `on_step()` at the beginning of every step, the first one included.

    `on_update()` follows every optimizer's step: the last one before the next step is where a step's work ends.

    `accepts` says of a module whether it may be the model. One that the job drops is gone, with all that it holds; no
    step begins any more.
    """

    def __init__(
        self,
        on_model: Callable[[nn.Module], None],
        on_step: Callable[[], None],
        accepts: Callable[[nn.Module], bool],
        on_update: Callable[[], None] = lambda: None,
    ) -> None:
        self._accepts = accepts
        self._on_update = on_update
        self._on_model = on_model
        self._on_step = on_step
        self._has_updated = True
        self._has_run = False  # the model, since the last update
        self._is_pipelined = False
        self._model: weakref.ref[nn.Module] | None = None
        self._parameters: set[int] = set()
        self._has_own_optimizer: bool | None = None  # nobody has looked yet
        self._compiled: nn.Module | None = None  # what ran compiled since the last update, the outermost module of it
        # The outermost module is the first to be entered and the last to be left.
        self._search = (
            register_module_forward_pre_hook(self._look_at),
            register_module_forward_hook(self._look_at_compiled),
        )
        self._show_search = _hidden_from_compile({hook.id for hook in self._search})
        self._hooks: list[Any] = [register_optimizer_step_post_hook(self._after_update)]

    def close(self) -> None:
        """Removes every hook; safe to call twice."""
        self._end_search()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _look_at(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self._accepts(module):
            return
        self._train(module)
        # The hook just added is not run for the call under way.
        self._before_forward(module, None)

    def _look_at_compiled(self, module: nn.Module, _: Any, __: Any) -> None:
        if torch.compiler.is_compiling() and torch.is_grad_enabled() and self._accepts(module):
            self._compiled = module

    def _train(self, module: nn.Module) -> None:
        self._end_search()
        _log.debug("training %s", type(module).__name__)
        self._model = weakref.ref(module)
        self._is_pipelined = is_pipelined()
        self._hooks.append(module.register_forward_pre_hook(_BeforeForward(self)))
        self._on_model(module)

    def _end_search(self) -> None:
        for hook in self._search:
            hook.remove()
        self._show_search()

    def _is_of_model(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an update is one of the model's, as far as can be told."""
        if self._model is None:
            return True
        if (model := self._model()) is None:
            return False
        if not self._holds_some(optimizer):
            # Again, for some are exchanged while the model is trained.
            self._parameters = {id(parameter) for parameter in model.parameters()}
        if self._holds_some(optimizer):
            self._has_own_optimizer = True
            return True
        if self._has_own_optimizer is None:
            # Looks at all objects, once in a job, and only in one that has an optimizer of something else.
            optimizers = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
            self._has_own_optimizer = any(self._holds_some(each) for each in optimizers)
        return not self._has_own_optimizer

    def _holds_some(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it works on parameters of the model: the first of a group speaks for the group."""
        groups = getattr(optimizer, "param_groups", ())  # one that is just being made has none
        return any(id(group["params"][0]) in self._parameters for group in groups if group["params"])

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_of_model(optimizer):
            return
        self._on_update()
        ran, self._compiled = self._compiled, None
        if ran is not None and self._model is None:
            self._train(ran)
        has_run, self._has_run = self._has_run, False
        # What is not the model was compiled while the search was on, and still stores itself.
        has_run_compiled = ran is not None and self._model is not None and ran is self._model()
        begins = has_run_compiled or (self._is_pipelined and has_run)
        self._has_updated = not begins and not self._is_pipelined
        if begins:
            self._on_step()

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                self._compiled = module
            return
        if not torch.is_grad_enabled():
            return
        self._has_run = True
        if self._has_updated:
            self._has_updated = False
            self._on_step()


def _hidden_from_compile(numbers: set[int]) -> Callable[[], None]:
    """Hides hooks on all modules, by their numbers, from what `torch.compile` warns of; returns how to end that.

    A warning is an error in some jobs, and this one is not of theirs.
    """
    everywhere: Any = nn.modules.module
    original = getattr(everywhere, "_has_any_global_hook", None)

    def has_any_global_hook() -> bool:
        passes = ("_global_forward", "_global_backward")  # not those that watch what a module registers
        kinds = [hooks for name, hooks in vars(everywhere).items() if name.startswith(passes)]
        return any(not numbers.issuperset(hooks) for hooks in kinds if isinstance(hooks, dict))

    def show() -> None:
        if getattr(everywhere, "_has_any_global_hook", None) is has_any_global_hook:
            everywhere._has_any_global_hook = original

    if original is not None:  # a release of PyTorch without that private name does not ask
        everywhere._has_any_global_hook = has_any_global_hook
    return show


class _BeforeForward:
    """The model's hook. Jobs copy and pickle whole models: the hook of a copy does nothing, and needs nothing of ours.

    The session behind it can be neither copied nor pickled, and a copy's calls begin no steps.
    """

    def __init__(self, steps: TrainingSteps) -> None:
        self._steps = steps

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        self._steps._before_forward(module, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # `{}.get(module, arguments)` gives the arguments back, which torch takes for those that the hook wants.
        return getattr, ({}, "get")


def is_pipelined() -> bool:
    """Whether this process holds a stage of a pipeline of two and more. Looks at all objects: once in a job."""
    megatron = sys.modules.get("megatron.core.parallel_state")
    count = getattr(megatron, "get_pipeline_model_parallel_world_size", None)
    try:
        if count is not None and count() > 1:
            return True
    except Exception:  # theirs: no groups of Megatron's
        _log.debug("no stages of Megatron-Core", exc_info=True)
    stages = tuple(filter(None, (getattr(sys.modules.get(where), name, None) for where, name in _STAGES)))
    return bool(stages) and any(issubclass(type(each), stages) for each in gc.get_objects())


def is_trained(module: nn.Module) -> bool:
    """Whether a module has parameters to train."""
    return any(parameter.requires_grad for parameter in module.parameters())


def is_trained_in_parallel(module: nn.Module) -> bool:
    """Whether gradients of this module are exchanged by a framework that we know, among two ranks or more.

    A rank that also trains something by itself, wrapped as usual, would else be taken to train that.
    """
    return any(_is_exchanged(part) for part in module.modules())


def _is_exchanged(module: nn.Module) -> bool:
    if isinstance(module, DistributedDataParallel):
        return module.process_group.size() > 1
    if not isinstance(module, FSDPModule):
        return False
    return any(isinstance(each, DTensor) and each.device_mesh.size() > 1 for each in module.parameters())
