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
from operator import getitem
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import fx

from lagom_overlap.capturing.fake_tensor import TrainingStep
from lagom_overlap.capturing.fx import FxCapture, capture_fx, capture_graph
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.fx.nodes import C10D, Editor, FxCollective, is_wait, lint, op_name, value_of
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


_KINDS: Final[dict[object, CollectiveKind]] = {
    C10D.all_gather_into_tensor_coalesced.default: CollectiveKind.ALL_GATHER,
    C10D.reduce_scatter_tensor_coalesced.default: CollectiveKind.REDUCE_SCATTER,
    C10D.all_reduce_coalesced.default: CollectiveKind.ALL_REDUCE,
}


def one_tensor_each(graph: fx.Graph) -> bool:
    """Makes collectives of one of the graph's collectives of several tensors, in place; whether there were any.

    `all_gather_into_tensor_coalesced` and its like start one collective per tensor in one call. Here the tensors travel
    as one, which every rewrite knows: a copy before and views after, one latency as before. Gathers are equal bit for
    bit; a sum may add ranks in another order, for a library's order depends on where an element lies.

    Raises:
        JobError: if tensors of one call differ in element type, or a result is used before it is awaited.
    """
    several = [node for node in graph.nodes if node.op == "call_function" and node.target in _KINDS]
    for node in several:
        _replace(graph, node)
    if several:
        lint(graph)
    return bool(several)


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    kind, sources = _KINDS[node.target], node.args[0]
    assert isinstance(sources, Sequence), "coalesced collectives take a list first"
    tensors = [source for source in sources if isinstance(source, fx.Node)]
    if len({value_of(tensor).dtype for tensor in tensors}) != 1:
        raise JobError(f"{op_name(node)!r} moves tensors of several element types at once, which cannot be planned")
    waits = _waits(node)
    with graph.inserting_before(node):
        parts = _as_one(Editor(graph), node, kind, tensors)
    for number, waited in waits:
        waited.replace_all_uses_with(parts[number])
    for _, waited in waits:
        graph.erase_node(waited)
    for element in list(node.users):
        graph.erase_node(element)
    graph.erase_node(node)


def _waits(node: fx.Node) -> list[tuple[int, fx.Node]]:
    """The waits of a call's results, each with the number of its tensor."""
    waits: list[tuple[int, fx.Node]] = []
    for element in node.users:
        if element.target is not getitem or not all(is_wait(user) for user in element.users):
            raise JobError(f"collective {op_name(node)!r} is used before it is awaited")
        number = element.args[1]
        assert isinstance(number, int), "an index"
        waits += [(number, waited) for waited in element.users]
    return waits


def _as_one(editor: Editor, node: fx.Node, kind: CollectiveKind, tensors: list[fx.Node]) -> list[fx.Node]:
    """What each tensor becomes, from one collective of all."""
    reduces = kind.traits.adds
    num_ranks = 1 if kind is CollectiveKind.ALL_REDUCE else int(str(node.args[2 if reduces else 1]))
    what = FxCollective(kind, tensors[0], str(node.args[-1]), str(node.args[1]) if reduces else None)
    waited, parts = editor.collective_of_all(what, tensors, num_ranks)
    _take_place(waited.all_input_nodes[0], node)
    return parts


def _take_place(call: fx.Node, node: fx.Node) -> None:
    """Gives a new call the short name of what it does, and where the old one comes from."""
    call._rename(str(call.target).split(".")[-2])
    call.meta |= {key: value for key, value in node.meta.items() if key not in call.meta}
