"""A training step as code: a function of a Python file.

The function is called with nothing, on every rank, once `torch.distributed` is initialised, and returns the step and
its inputs: `(step, inputs)`. The step is called as `step(*inputs)`, uses functional collectives
(`torch.distributed._functional_collectives`), returns tensors and changes nothing in place.

A function may return a `TrainingStep` instead, as for `lagom capture`: of a framework's step (FSDP2, DDP), whose
collectives run in hooks and leave no graph. It is captured then, and a plan for it is settings.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from lagom_overlap.capturing.fake_tensor import TrainingStep
from lagom_overlap.capturing.fx import FxCapture, capture_fx, capture_graph
from lagom_overlap.engines.fx.coalesced import one_tensor_each
from lagom_overlap.errors import JobError, LagomError


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """The step on this rank and what it is called with; `script` is where it comes from."""

    script: Path
    step: Callable[..., Any]
    inputs: tuple[Any, ...]

    def captured(self, name: str) -> FxCapture:
        """The graph of the step, its collectives each of one tensor; nothing is computed or sent.

        Raises:
            JobError: if it cannot be traced.
        """
        try:
            with torch.enable_grad():
                captured_step = capture_step(self.step, self.inputs, name=name)
        except LagomError:
            raise
        except Exception as error:
            raise JobError(f"program {str(self.script)!r} cannot be traced: {type(error).__name__}: {error}") from error
        if any(str(node.target).startswith("c10d.") for node in captured_step.graph_module.graph.nodes):
            raise JobError(
                f"program {str(self.script)!r} cannot be planned as a graph: a module in it runs its collectives in "
                f"hooks (FSDP2, DDP), on process groups that no graph can name; let {name}() return a TrainingStep"
            )
        return captured_step


def capture_step(step: Callable[..., Any], inputs: Sequence[Any], *, name: str) -> FxCapture:
    """The graph of a step, its collectives each of one tensor; nothing is computed or sent."""
    captured_graph = capture_fx(step, inputs, name=name, is_fake=True)
    if not one_tensor_each(captured_graph.graph_module.graph):
        return captured_graph
    captured_graph.graph_module.recompile()
    capture = capture_graph(captured_graph.graph_module, num_ranks=dist.get_world_size(), name=name)
    return replace(captured_graph, capture=capture)


class TrainingStepError(JobError):
    """Raised where a program's function makes a `TrainingStep`, which is captured by `build`, not traced."""

    def __init__(self, where: str, build: Callable[[], Any]) -> None:
        super().__init__(f"{where} makes a TrainingStep: its framework runs it, and takes settings, no rewrites")
        self.build = build


def load_program(script: Path, function: str) -> LoadedProgram:
    """Runs the file and the function in it; one that is declared to return a `TrainingStep` is not called.

    Raises:
        TrainingStepError: if it makes a `TrainingStep`.
        JobError: if the file or the function does not exist, or what it returns is no step.
    """
    where = f"program {str(script)!r}"
    if not script.is_file():
        raise JobError(f"{where} does not exist")
    spec = spec_from_file_location(f"lagom_program_{script.stem}", script)
    if spec is None or spec.loader is None:
        raise JobError(f"{where} is no Python file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles of the script look their module up
    try:
        with torch.enable_grad():
            spec.loader.exec_module(module)
            build = getattr(module, function, None)
            declared = getattr(build, "__annotations__", {}).get("return")
            if callable(build) and declared in (TrainingStep, TrainingStep.__name__):
                raise TrainingStepError(f"{where}: {function}()", build)
            returned = build() if callable(build) else None
    except TrainingStepError:
        raise
    except (Exception, SystemExit) as error:
        raise JobError(f"{where} failed: {type(error).__name__}: {error}") from error
    if build is None:
        raise JobError(f"{where} has no function {function!r}")
    if isinstance(returned, TrainingStep):
        raise TrainingStepError(f"{where}: {function}()", build)
    if not (isinstance(returned, tuple) and len(returned) == 2 and callable(returned[0])):
        raise JobError(f"{where}: {function}() must return (step, inputs), it returned {type(returned).__name__}")
    step, inputs = returned
    if not isinstance(inputs, Sequence):
        raise JobError(f"{where}: the inputs of {function}() must be a list, they are {type(inputs).__name__}")
    return LoadedProgram(script, step, tuple(inputs))
