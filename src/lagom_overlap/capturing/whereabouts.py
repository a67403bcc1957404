"""Where in the model an operator comes from: module, layer, phase, micro-batch.

Forward: the stack of modules that run. Backward: autograd's node carries the sequence number that its forward operator
had, so the module of that operator is looked up; FSDP's own operators carry their module in a profiler label. Works for
any module without changing it, and for recomputation (a forward that runs inside a backward).
"""

import re
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lagom_overlap.workload import Origin, Phase

_LABEL: Final = re.compile(r"\(([^()]*)\)$|prefetch for (\S+)$")
_LAYER: Final = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_WRAPPERS: Final = re.compile(r"_checkpoint_wrapped_module\.?|_orig_mod\.?")

_ENTER: Final = "profiler::_record_function_enter_new"


def _sequence_number() -> int:
    """The number that autograd gives to the next node."""
    return int(torch._C._autograd._get_sequence_nr())


class Whereabouts:
    """Follows the modules of a model while it runs; a context manager."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = {} if model is None else dict(model.named_modules(remove_duplicate=True))
        self._names = {module: _WRAPPERS.sub("", name).rstrip(".") for name, module in modules.items()}
        self._stack: list[str] = []
        self._labels: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._hooks: list[Any] = []  # torch's RemovableHandle
        self._last = ""
        self._outside = Phase.FORWARD if model is None else Phase.LOSS
        self.microbatch = 0
        self.in_optimizer = False

    def __enter__(self) -> "Whereabouts":
        self._hooks = [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._stack.clear()

    def _entered(self, module: nn.Module, _: object) -> None:
        if module in self._names:
            self._stack.append(self._names[module])

    def _left(self, module: nn.Module, *_: object) -> None:
        if module in self._names and self._stack:
            self._stack.pop()

    def label(self, schema_name: str, arguments: tuple[Any, ...]) -> None:
        """A profiler label begins or ends."""
        if schema_name == _ENTER:
            self._labels.append(str(arguments[0]) if arguments else "")
        elif self._labels:
            self._labels.pop()

    def note_forward(self) -> None:
        """Called for every dispatched operator: remembers the module of the autograd node that it belongs to."""
        if self._stack:
            self._module_of_node.setdefault(_sequence_number() - 1, self._stack[-1])

    @property
    def forward_node(self) -> int | None:
        """The number of the forward node that the running operator belongs to, in forward and in backward alike."""
        node = torch._C._current_autograd_node()
        return _sequence_number() - 1 if node is None else int(node._sequence_nr())

    def origin(self, kernel: str) -> Origin:
        """Where the operator that runs now comes from."""
        in_backward = torch._C._current_graph_task_id() != -1
        if self.in_optimizer:
            return Origin(phase=Phase.OPTIMIZER, microbatch=self.microbatch, kernel=kernel)
        if in_backward:
            phase = Phase.RECOMPUTE if self._stack and torch.is_grad_enabled() else Phase.BACKWARD
        else:
            phase = Phase.FORWARD if self._stack else self._outside
        module = self._module(in_backward)
        match = _LAYER.search(module)
        return Origin(
            phase=phase,
            layer=int(match[1]) if match else None,
            microbatch=self.microbatch,
            module=module,
            kernel=kernel,
        )

    def _module(self, in_backward: bool) -> str:
        if self._labels and (match := _LABEL.search(self._labels[-1])):
            return str(match[1] or match[2])
        if self._stack:
            return self._stack[-1]
        if in_backward:
            node = torch._C._current_autograd_node()
            known = None if node is None else self._module_of_node.get(int(node._sequence_nr()))
            self._last = self._last if known is None else known
            return self._last
        return ""
