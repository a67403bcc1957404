"""A traced step as a program: what it holds, which axes its calls have. Numbers: tests/planners/sharding_search."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from lagom_overlap.capturing.call_axes import call_axes  # noqa: E402
from lagom_overlap.capturing.fake_tensor import TrainingStep  # noqa: E402
from lagom_overlap.capturing.tensor_program import capture_program  # noqa: E402
from lagom_overlap.errors import JobError  # noqa: E402
from lagom_overlap.workload import Gemm, Phase  # noqa: E402
from lagom_overlap.workload.tensor_program import TensorProgram, ValueKind  # noqa: E402

pytestmark = pytest.mark.torch


def step(num_micro_batches: int = 1) -> TrainingStep:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64, bias=False))
    return TrainingStep(
        model=model,
        inputs=(torch.zeros(32, 64),),
        loss=lambda y: y.square().mean(),
        num_micro_batches=num_micro_batches,
    )


@pytest.fixture(scope="module")
def program() -> TensorProgram:
    return capture_program(step).program


def test_parameters_keep_their_names_and_have_a_gradient_each(program: TensorProgram) -> None:
    named = [name for name, value in program.values.items() if value.kind is ValueKind.PARAMETER]
    assert named == ["0.weight", "0.bias", "2.weight"]
    assert [parameter for parameter, _ in program.gradients] == named
    for parameter, gradient in program.gradients:
        assert program.values[gradient].shape == program.values[parameter].shape


def test_products_of_forward_and_backward_are_there_with_their_work(program: TensorProgram) -> None:
    """Two forward, one for the input of the second, two for the weights: five of 2 x 32 x 64 x 256 operations."""
    products = [call for call in program.calls if isinstance(call.work, Gemm)]
    assert len(products) == 5
    assert {call.work.flops for call in products if isinstance(call.work, Gemm)} == {2 * 32 * 64 * 256}
    assert [call.origin.phase for call in products].count(Phase.BACKWARD) == 3


def test_an_optimizer_updates_each_parameter_from_its_gradient(program: TensorProgram) -> None:
    updated = program.with_updates(state_bytes_per_element=8)
    calls = [call for call in updated.calls if call.updates is not None]
    assert [call.updates for call in calls] == ["0.weight", "0.bias", "2.weight"]
    assert [call.state_bytes for call in calls] == [8 * 64 * 256, 8 * 256, 8 * 64 * 256]
    with pytest.raises(JobError, match="no gradients"):
        updated.with_updates()


def test_several_micro_batches_are_refused() -> None:
    with pytest.raises(JobError, match="one micro-batch"):
        capture_program(lambda: step(2))


def axes_of(func: torch._ops.OpOverload, *arguments: object) -> tuple[list[tuple], list[tuple], list[set]]:
    made = func(*arguments)
    outputs = [made] if isinstance(made, torch.Tensor) else [t for t in made if isinstance(t, torch.Tensor)]
    names = [argument.name for argument in func._schema.arguments]
    found = call_axes(func, dict(zip(names, arguments, strict=False)), outputs)
    return [axes for _, axes in found.inputs], list(found.outputs), [set(s) for s in found.summed]


def test_a_product_with_a_bias_is_summed_over_its_depth() -> None:
    inputs, outputs, summed = axes_of(
        torch.ops.aten.addmm.default, torch.zeros(8), torch.zeros(4, 6), torch.zeros(6, 8)
    )
    assert (inputs, outputs, summed) == ([(0, 1), (1, 2), (2,)], [(0, 2)], [{1}])


@pytest.mark.parametrize(
    ("dims", "keepdim"), [([0], False), ([1], False), ([2], True), ([-1], False), ([-3, 1], True), ([0, 1, 2], False)]
)
def test_a_sum_over_pieces_of_an_axis_is_the_sum_or_its_pieces(dims: list[int], keepdim: bool) -> None:
    """By the numbers: pieces along an axis of the input give pieces along it of the output, or add up to it."""
    whole = torch.arange(2.0 * 4 * 6).reshape(2, 4, 6)
    expected = whole.sum(dims, keepdim)
    (reads,), (writes,), (summed,) = axes_of(torch.ops.aten.sum.dim_IntList, whole, dims, keepdim)
    assert reads == (0, 1, 2)
    for dim, axis in enumerate(reads):
        pieces = [piece.sum(dims, keepdim) for piece in whole.chunk(2, dim)]
        assert (axis in writes) != (axis in summed)
        made = torch.cat(pieces, writes.index(axis)) if axis in writes else pieces[0] + pieces[1]
        assert torch.equal(made, expected)


@pytest.mark.parametrize(
    ("before", "after", "reads", "writes"),
    [
        ((4, 6, 8), (24, 8), (0, None, 1), (0, 1)),
        ((24, 8), (4, 6, 8), (0, 1), (0, None, 1)),
        ((4, 6, 8), (4, 6, 2, 4), (0, 1, 2), (0, 1, 2, None)),
        ((1, 8), (8,), (None, 0), (0,)),
        ((4, 1, 8), (4, 8, 1), (0, None, 1), (0, 1, None)),
    ],
)
def test_a_reshape_keeps_the_first_of_merged_dimensions(
    before: tuple[int, ...], after: tuple[int, ...], reads: tuple, writes: tuple
) -> None:
    inputs, outputs, _ = axes_of(torch.ops.aten.view.default, torch.zeros(before), list(after))
    assert (inputs, outputs) == ([reads], [writes])


def test_an_unknown_operator_is_done_whole_by_every_rank() -> None:
    inputs, outputs, _ = axes_of(torch.ops.aten.linalg_inv_ex.default, torch.eye(4))
    assert {axis for axes in (*inputs, *outputs) for axis in axes} == {None}
