"""What stands in for cuDNN and cuFFT, worked by hand on fake tensors; what needs other libraries is refused by name."""

import contextlib
from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from lagom_emulate.operator_outputs import Outputs  # noqa: E402
from lagom_emulate.stand_ins import StandIns, UnsupportedOperatorError  # noqa: E402

pytestmark = pytest.mark.torch
aten = torch.ops.aten


class Launches:
    """Keeps each kernel with what was said of it."""

    def __init__(self) -> None:
        self.kernels: list[tuple[str, dict[str, object]]] = []
        self._said: dict[str, object] | None = None

    def describe_next(self, fields) -> None:
        self._said = fields

    def launch(self, name: str, stream: int) -> None:
        assert self._said is not None
        self.kernels.append((name, self._said))


@pytest.fixture(autouse=True)
def mode(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 7}))
    with FakeTensorMode(allow_non_fake_inputs=True) as found:
        yield found


def gpu(*shape: int, dtype=torch.bfloat16):
    return torch.empty(*shape, device="cuda", dtype=dtype)


def run(operator, *args: object):
    launches = Launches()
    call = StandIns(torch, launches, Outputs(torch)).call(operator, args, {})
    assert call is not None
    return call(), launches.kernels


def gemm(m: int, n: int, k: int, batch: int = 1) -> dict[str, object]:
    return {"m": m, "n": n, "k": k, "batch": batch, "dtype": "bfloat16"}


def flops(kernels: Sequence[tuple[str, dict[str, object]]]) -> int:
    products = [fields["gemm"] for _, fields in kernels if "gemm" in fields]
    return sum(2 * one["m"] * one["n"] * one["k"] * one["batch"] for one in products)


def test_a_convolution_is_one_product_that_reads_each_tensor_once_and_its_bias() -> None:
    signal, weight = gpu(32, 64, 56, 56), gpu(128, 64, 3, 3)
    out, kernels = run(aten.convolution.default, signal, weight, gpu(128), [2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    assert out.shape == (32, 128, 28, 28)
    places, moved = 32 * 28 * 28, 2 * (32 * 64 * 56 * 56 + 128 * 64 * 9 + 32 * 128 * 28 * 28)
    assert kernels == [
        ("emulated_convolution", {"op": "aten::convolution", "bytes": moved, "gemm": gemm(places, 128, 64 * 9)}),
        ("emulated_bias", {"op": "aten::convolution", "bytes": 4 * 128 * places}),
    ]


@pytest.mark.parametrize(
    ("signal", "weight", "stride", "transposed", "groups"),
    [
        ((8, 64, 56, 56), (128, 64, 3, 3), [1, 1], False, 1),
        ((8, 64, 56, 56), (128, 32, 3, 3), [2, 2], False, 2),
        ((8, 64, 28, 28), (64, 32, 4, 4), [2, 2], True, 1),
        ((8, 64, 28, 28), (64, 32, 4, 4), [2, 2], True, 4),
        ((4, 80, 3000), (384, 80, 3), [1], False, 1),
        ((2, 16, 8, 32, 32), (32, 16, 3, 3, 3), [1, 1, 1], False, 1),
    ],
)
def test_products_are_as_many_as_pytorchs_own_formula_counts(signal, weight, stride, transposed, groups) -> None:
    from torch.utils.flop_counter import flop_registry

    x, w = gpu(*signal), gpu(*weight)
    ones, zeros = [1] * len(stride), [0] * len(stride)
    call = (x, w, None, stride, ones, ones, transposed, zeros, groups)
    out, kernels = run(aten.convolution.default, *call)
    # Where places do not divide evenly (padding at the edges), a product's depth is rounded.
    assert flops(kernels) == pytest.approx(flop_registry[aten.convolution](*call, out_val=out), rel=0.01)
    back = (gpu(*out.shape), x, w, [w.shape[0]], *call[3:], [True, True, True])
    grads, kernels = run(aten.convolution_backward.default, *back)
    assert [each.shape for each in grads[:2]] == [x.shape, w.shape]
    assert [name for name, _ in kernels] == [
        "emulated_convolution_dgrad", "emulated_convolution_wgrad", "emulated_bias_gradient",
    ]  # fmt: skip
    # PyTorch's formula counts a group's products for every other group in the weight's gradient.
    if groups == 1:
        assert flops(kernels) == pytest.approx(flop_registry[aten.convolution_backward](*back, out_val=grads), rel=0.02)


def test_a_convolution_with_a_group_a_channel_is_its_bytes() -> None:
    call = (gpu(8, 64, 32, 32), gpu(64, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 64)
    _, ((_, fields),) = run(aten.convolution.default, *call)
    assert fields == {"op": "aten::convolution", "bytes": 2 * (2 * 8 * 64 * 32 * 32 + 64 * 9)}


def test_a_transform_passes_over_its_data_for_each_dimension() -> None:
    out, kernels = run(aten._fft_r2c.default, gpu(64, 1024, dtype=torch.float32), [0, 1], 0, True)
    assert (out.shape, out.dtype) == ((64, 513), torch.complex64)
    assert [fields["bytes"] for _, fields in kernels] == [4 * 64 * 1024 + 8 * 64 * 513, 2 * 8 * 64 * 513]


def test_arguments_that_fit_nothing_are_for_pytorch_to_refuse() -> None:
    stand_ins = StandIns(torch, Launches(), Outputs(torch))
    call = (gpu(8, 64, 32, 32), gpu(64, 7, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert stand_ins.call(aten.convolution.default, call, {}) is None


@pytest.mark.parametrize(
    ("operator", "error", "line"),
    [
        (aten._linalg_svd.default, "dlopen: libcusolver.so.12: undefined symbol", "aten::_linalg_svd needs cuSOLVER"),
        (aten.mm.default, "CUDA error when calling `cusparseCreate(handle)`", "aten::mm needs cuSPARSE"),
        (aten._fft_r2c.out, "cuFFT error: CUFFT_INTERNAL_ERROR", "aten::_fft_r2c needs cuFFT"),
    ],
)  # fmt: skip
def test_what_fails_for_lack_of_a_library_is_one_line_with_its_name(operator, error: str, line: str) -> None:
    stand_ins = StandIns(torch, Launches(), Outputs(torch))
    found = stand_ins.named(operator, RuntimeError(error))
    assert str(found) == f"lagom emulate: {line}, which is not emulated"
    other = RuntimeError("a user's own")
    assert stand_ins.named(operator, other) is other


def test_sparse_tensors_and_eigenvalues_are_refused_before_anything_runs() -> None:
    stand_ins = StandIns(torch, Launches(), Outputs(torch))

    class Sparse(torch.Tensor):
        is_cuda, layout = True, torch.sparse_coo

    with torch.utils._python_dispatch._disable_current_modes():
        sparse = torch.empty(4).as_subclass(Sparse)
    with pytest.raises(UnsupportedOperatorError, match=r"aten::neg needs sparse tensors on a GPU"):
        stand_ins.call(aten.neg.default, (sparse,), {})
    with pytest.raises(UnsupportedOperatorError, match=r"aten::_to_sparse needs sparse tensors on a GPU"):
        stand_ins.call(aten._to_sparse.default, (gpu(4, 4),), {})
    for solver, inputs in ((aten.linalg_eig, 1), (aten.linalg_lstsq, 2)):  # both read values before they call it
        with pytest.raises(UnsupportedOperatorError, match=rf"aten::{solver.__name__} needs cuSOLVER"):
            stand_ins.call(solver.default, (gpu(4, 4),) * inputs, {})
    assert stand_ins.call(aten.neg.default, (gpu(4),), {}) is None
