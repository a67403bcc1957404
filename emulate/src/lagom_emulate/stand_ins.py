"""Operators that run a library of NVIDIA's which is not emulated.

cuDNN's convolutions and cuFFT's transforms have a stand-in: the result is made by its sizes, and kernels that compute
nothing take the library's time. PyTorch's own convolutions, which it takes where cuDNN is off, are no measure: one
product for each image, each launched for itself.

    convolution             a kernel as an implicit matrix product, whose operands are read once; plus the bias
    its backward pass       one for the gradient of the input, one for the weight's, a reduction for the bias's
    with a group a channel  by bytes: there is nothing to multiply by tensor cores
    Fourier transform       a pass over the data for each transformed dimension

Winograd's and FFT's ways to convolve, and layouts that are changed on the way, are not modelled. What needs cuSOLVER,
cuSPARSE, or a sparse tensor is refused with the operator's name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Protocol

from lagom_emulate.operator_outputs import Outputs
from lagom_overlap.errors import LagomError

_LIBRARIES: Final = {
    "libcusolver": "cuSOLVER",
    "cusolver": "cuSOLVER",
    "cusparse": "cuSPARSE",
    "aten::_cslt": "cuSPARSELt",
    "cuFFT": "cuFFT",
    "cuDNN": "cuDNN",
    "CUDNN": "cuDNN",
}
"""By what PyTorch's errors say of them, or its operators are called."""
_NEEDS_CUSOLVER: Final = frozenset({"aten::linalg_eig", "aten::_linalg_eigvals", "aten::linalg_lstsq"})
"""They look at what kernels computed before they call the library."""


class UnsupportedOperatorError(LagomError, RuntimeError):
    """Raised in the job by an operator that cannot be emulated; PyTorch's own error is a RuntimeError, too."""


class Launcher(Protocol):
    """What this module asks of the emulated driver."""

    def describe_next(self, fields: Mapping[str, Any] | None) -> None:
        """What the kernels are that this thread launches next; None: not known."""

    def launch(self, name: str, stream: int) -> None:
        """A kernel by its name, which computes nothing."""


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """A kernel of a library's, and what its description says."""

    name: str
    fields: Mapping[str, Any]


class StandIns:
    """In place of the libraries' operators, in one process."""

    def __init__(self, torch: Any, device: Launcher, outputs: Outputs) -> None:
        self._torch, self._device, self._outputs = torch, device, outputs

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
        """What gives the operator's result in its place; None where the operator itself is to run.

        Raises:
            UnsupportedOperatorError: if it cannot be emulated.
        """
        name = func._schema.name
        kernels_of = _KERNELS.get(name)
        if kernels_of is not None and not func._schema.overload_name and args and args[0].is_cuda:
            return self._in_place_of(func, args, kwargs, kernels_of)
        if name in _NEEDS_CUSOLVER and args[0].is_cuda:
            raise UnsupportedOperatorError(refusal(name, "cuSOLVER"))
        # Those that make one count what kernels should have found, and take memory by it.
        makes_sparse = name.startswith("aten::_to_sparse") and args[0].is_cuda
        if makes_sparse or any(self._is_sparse(value) for value in args):
            raise UnsupportedOperatorError(refusal(name, "sparse tensors on a GPU (cuSPARSE)"))
        return None

    def named(self, func: Any, error: RuntimeError) -> RuntimeError:
        """An operator's error, or one in its place that says in a line which library is not emulated."""
        text = f"{func._schema.name} {error}"
        library = next((library for word, library in _LIBRARIES.items() if word in text), None)
        return error if library is None else UnsupportedOperatorError(refusal(func._schema.name, library))

    def _is_sparse(self, value: Any) -> bool:
        return isinstance(value, self._torch.Tensor) and value.is_cuda and value.layout is not self._torch.strided

    def _in_place_of(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kernels_of: "_KernelsOf"
    ) -> Callable[[], Any] | None:
        torch, device = self._torch, args[0].device

        def made(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
            return type(value)(made(each) for each in value) if isinstance(value, (list, tuple)) else value

        try:
            sizes = self._outputs.of(func, args, kwargs)
            names = [argument.name for argument in func._schema.arguments]
            kernels = kernels_of(func._schema.name, {**dict(zip(names, args, strict=False)), **kwargs}, sizes)
        except Exception:  # arguments that fit nothing, which is for PyTorch to say
            return None

        def run() -> Any:
            result = made(sizes)
            with torch.cuda.device(device):
                for kernel in kernels:
                    self._launch(kernel, torch.cuda.current_stream().cuda_stream)
            return result

        return run

    def _launch(self, kernel: LibraryKernel, stream: int) -> None:
        self._device.describe_next(kernel.fields)
        try:
            self._device.launch(kernel.name, stream)
        finally:
            self._device.describe_next(None)


def refusal(operator: str, what: str) -> str:
    """The line for an operator that cannot be emulated."""
    return f"lagom emulate: {operator} needs {what}, which is not emulated"


_KernelsOf = Callable[[str, Mapping[str, Any], Any], list[LibraryKernel]]


def _convolution(name: str, values: Mapping[str, Any], result: Any) -> list[LibraryKernel]:
    signal, weight = values["input"], values["weight"]
    if not result.numel() or not signal.numel():
        return []
    shared = _Filter(weight, values["groups"], _places(signal if values["transposed"] else result))
    kernels = [shared.kernel(name, "emulated_convolution", (signal, weight, result), result)]
    if values["bias"] is not None:  # PyTorch adds it behind cuDNN's kernel
        kernels.append(LibraryKernel("emulated_bias", {"op": name, "bytes": 2 * _bytes(result)}))
    return kernels


def _convolution_backward(name: str, values: Mapping[str, Any], result: Sequence[Any]) -> list[LibraryKernel]:
    gradient, signal, weight = values["grad_output"], values["input"], values["weight"]
    if not gradient.numel() or not signal.numel():
        return []
    shared = _Filter(weight, values["groups"], _places(signal if values["transposed"] else gradient))
    of_signal, of_weight, of_bias = result
    kernels = []
    if of_signal is not None:
        kernels.append(shared.kernel(name, "emulated_convolution_dgrad", (gradient, weight, of_signal), of_signal))
    if of_weight is not None:
        kernels.append(shared.kernel(name, "emulated_convolution_wgrad", (gradient, signal, of_weight), None))
    if of_bias is not None:
        fields = {"op": name, "bytes": _bytes(gradient) + _bytes(of_bias), "access": "reduction"}
        kernels.append(LibraryKernel("emulated_bias_gradient", fields))
    return kernels


@dataclass(frozen=True, slots=True)
class _Filter:
    """A convolution's weight, its groups, and at how many places it is laid on, over the whole batch.

    A result, a gradient of the input and one of the weight take as many products: places x weights x groups' channels.
    """

    weight: Any
    groups: int
    num_places: int

    def kernel(self, operator: str, name: str, tensors: Sequence[Any], made: Any | None) -> LibraryKernel:
        """The kernel as an implicit matrix product that makes `made` (None: the gradient of the weight)."""
        fields: dict[str, Any] = {"op": operator, "bytes": sum(map(_bytes, tensors))}
        # A weight is (out, in of a group, ...), transposed (in, out of a group, ...).
        first, second, taps = self.weight.shape[0] // self.groups, self.weight.shape[1], prod(self.weight.shape[2:])
        rows, columns = first, second * taps
        if made is not None:
            rows, columns = _places(made), made.shape[1] // self.groups
        depth = self.num_places * first * second * taps / (rows * columns)
        if self.groups == 1 or min(first, second) > 1:
            sizes = {"m": rows, "n": columns, "k": max(1, round(depth)), "batch": self.groups}
            fields["gemm"] = sizes | {"dtype": str(self.weight.dtype).removeprefix("torch.")}
        return LibraryKernel(name, fields)


def _transform(name: str, values: Mapping[str, Any], result: Any) -> list[LibraryKernel]:
    once = _bytes(values["self"]) + _bytes(result)
    again = 2 * max(_bytes(values["self"]), _bytes(result))
    passes = [once] + [again] * (len(values["dim"]) - 1)
    return [LibraryKernel("emulated_fft", {"op": name, "bytes": num_bytes}) for num_bytes in passes]


_KERNELS: Final[Mapping[str, _KernelsOf]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::_fft_r2c": _transform,
    "aten::_fft_c2r": _transform,
    "aten::_fft_c2c": _transform,
}


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _places(tensor: Any) -> int:
    """Points of all images, whatever their channels."""
    return int(tensor.numel() // tensor.shape[1])
