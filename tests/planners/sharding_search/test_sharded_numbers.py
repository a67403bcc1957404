"""Sharded steps executed on simulated ranks give the numbers of the step on one device: rules, views, conversions."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("ortools", reason="needs the extra plan")

import simulated_ranks  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812  torch's customary name
from simulated_ranks import Simulated  # noqa: E402
from small_programs import problem_of  # noqa: E402
from torch import nn  # noqa: E402

from lagom_overlap.capturing.fake_tensor import TrainingStep  # noqa: E402
from lagom_overlap.capturing.models.decoder import Decoder  # noqa: E402
from lagom_overlap.capturing.tensor_program import TracedProgram, trace_program  # noqa: E402
from lagom_overlap.planners.deadline import Deadline  # noqa: E402
from lagom_overlap.planners.sharding_search.call_strategies import Need  # noqa: E402
from lagom_overlap.planners.sharding_search.integer_program import choose_sharding  # noqa: E402
from lagom_overlap.planners.sharding_search.mesh_layouts import Layout  # noqa: E402
from lagom_overlap.planners.sharding_search.sharding_problem import ShardingProblem, made_layouts  # noqa: E402
from lagom_overlap.workload.models import TransformerModel  # noqa: E402
from lagom_overlap.workload.tensor_program import ValueKind  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny operators: threads that wait for one another take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))) + x


def mlp_step() -> TrainingStep:
    x = torch.randn(8, 16, dtype=torch.float64)
    return TrainingStep(model=Mlp().double(), inputs=(x,), loss=lambda y: y.square().mean())


def convolution_step() -> TrainingStep:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1)).double()
    x = torch.randn(4, 4, 8, 8, dtype=torch.float64)
    return TrainingStep(model=model, inputs=(x,), loss=lambda y: y.mean(dim=(2, 3)).square().sum())


def decoder_step(*, gated: bool) -> TrainingStep:
    model = TransformerModel(
        name="tiny",
        num_layers=1,
        hidden=16,
        ffn=32,
        num_heads=4,
        num_kv_heads=4,
        head_dim=4,
        vocab=24,
        gated=gated,
        linear_bias=not gated,
        norm_bias=not gated,
    )
    ids = torch.randint(0, 24, (4, 8))
    return TrainingStep(
        model=Decoder(model).double(), inputs=(ids,), loss=lambda y: F.cross_entropy(y.flatten(0, 1), ids.flatten())
    )


STEPS = {
    "mlp": mlp_step,
    "convolutions": convolution_step,
    "decoder": lambda: decoder_step(gated=False),
    "gated decoder": lambda: decoder_step(gated=True),
}


Case = tuple[TracedProgram, dict[str, torch.Tensor], list[torch.Tensor]]


def traced(name: str) -> Case:
    """The program with all gradients as results, what it is given, and the numbers of one device."""
    torch.manual_seed(0)
    step = STEPS[name]()
    for parameter in step.model.parameters():
        nn.init.normal_(parameter, std=0.3)
    found = trace_program(step)
    program = found.program
    results = (*program.results, *(gradient for _, gradient in program.gradients))
    parameters = dict(step.model.named_parameters())
    given: dict[str, torch.Tensor] = {key: value.detach() for key, value in parameters.items()}
    placeholders = [node for node in found.graph_module.graph.nodes if node.op == "placeholder"]
    simulated_ranks.NAMES.update(dict(zip((node.name for node in placeholders), parameters, strict=False)))
    inputs = [node.name for node in placeholders[len(parameters) :] if node.name in program.values]
    given.update(zip(inputs, step.inputs, strict=True))
    for name_, value in program.values.items():  # constants of the graph
        if value.kind is ValueKind.INPUT and name_ not in given:
            given[name_] = found.graph_module._tensor_constant0
    loss, gradients = found.graph_module(list(parameters.values()), list(step.inputs), {})
    return (
        replace(found, program=replace(program, results=results, gradients=())),
        given,
        [tensor.detach() for tensor in (loss, *gradients)],
    )


def random_choice(problem: ShardingProblem, random: Random) -> list[int]:
    """Any option of each node that goes with what was chosen before it, both ways."""
    made: dict[str, Layout] = {}
    waiting: list[Need] = []
    choice = []

    def can_be_had(need: Need, here: dict[str, Layout]) -> bool:
        at = made.get(need.value, here.get(need.value))
        return (
            at is None or problem.conversions.between(problem.program.values[need.value], at, need.layout) is not None
        )

    for node in problem.nodes:
        possible = [
            number
            for number, option in enumerate(node.options)
            if all(can_be_had(need, dict(option.makes)) for need in (*option.needs, *waiting))
        ]
        choice.append(random.choice(possible))
        made |= made_layouts([node.options[choice[-1]]])
        waiting += node.options[choice[-1]].needs
    return choice


def check(problem: ShardingProblem, choice: list[int], case: Case) -> None:
    found, given, expected = case
    with torch.no_grad():
        results = Simulated(problem, choice, found, given).results()
    for ranks, whole in zip(results, expected, strict=True):
        for tensor in ranks:
            torch.testing.assert_close(tensor, whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize("name", list(STEPS))
def test_any_sharding_gives_the_numbers_of_one_device(name: str, shape: tuple[int, ...]) -> None:
    case = traced(name)
    for merge in (True, False):
        problem = problem_of(case[0].program, *shape, merge=merge)
        for seed in range(2):
            check(problem, random_choice(problem, Random(seed)), case)


@pytest.mark.parametrize("name", list(STEPS))
def test_the_chosen_sharding_gives_the_numbers_of_one_device(name: str) -> None:
    case = traced(name)
    problem = problem_of(case[0].program, 4)
    check(problem, list(choose_sharding(problem, deadline=Deadline(3000.0)).choice), case)
