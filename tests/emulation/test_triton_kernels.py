"""What is said of a job's own Triton kernels, on stand-ins of Triton's classes."""

from types import SimpleNamespace

import pytest

from lagom_emulate import triton_kernels


def tensor(count: int, at: int = 0) -> SimpleNamespace:
    return SimpleNamespace(numel=lambda: count, element_size=lambda: 2, data_ptr=lambda: at)


class TensorDescriptor:
    """As Triton's, for the memory accelerator."""

    def __init__(self, base: object) -> None:
        self.base = base


class Hook:
    def __init__(self, formula=None) -> None:
        self.said: list[dict[str, object] | None] = []
        self.formula = lambda target: formula

    def describe_kernel(self, fields) -> None:
        self.said.append(fields)


def launched(hook: Hook, *args: object, warmup: bool = False, **kwargs: object) -> list[object]:
    ran: list[object] = []

    class JITFunction:
        __name__, arg_names = "matmul", ("a", "b", "c", "n")

        def run(self, *args, grid, warmup, **kwargs):
            ran.append((len(args), grid, warmup, kwargs))
            if kwargs.get("fails"):
                raise RuntimeError("out of resources")

    triton_kernels._wrap(SimpleNamespace(JITFunction=JITFunction), hook)
    JITFunction().run(*args, grid=(8,), warmup=warmup, **kwargs)
    return ran


def test_a_kernel_touches_each_of_its_tensors_once_and_that_is_a_floor() -> None:
    hook = Hook()
    a, b = tensor(100, 1), tensor(50, 2)
    ((num_args, grid, warmup, _),) = launched(hook, a, b, a, 64, d=TensorDescriptor(tensor(7, 3)))
    assert (num_args, grid, warmup) == (4, (8,), False)
    assert hook.said == [{"op": "matmul", "bytes": 2 * (100 + 50 + 7), "floor": True}, None]


def test_a_registered_formula_is_called_as_pytorch_calls_it_and_lifts_the_floor() -> None:
    def formula(*args, kwargs, out_val, **wrapped):
        assert (args, out_val, wrapped["grid"]) == ((), None, [(8,)])
        return 2 * kwargs["a"].numel() * kwargs["n"]

    hook = Hook(formula)
    launched(hook, tensor(100, 1), tensor(50, 2), tensor(50, 3), n=64)
    assert hook.said[0] == {"op": "matmul", "bytes": 400, "flops": 2 * 100 * 64}
    broken = Hook(lambda **_: 1 // 0)
    launched(broken, tensor(100, 1))
    assert broken.said[0] == {"op": "matmul", "bytes": 200, "floor": True}


def test_what_launches_nothing_or_has_no_tensor_is_not_described() -> None:
    hook = Hook()
    launched(hook, tensor(100), warmup=True)
    launched(hook, 64)
    assert hook.said == []


def test_a_launch_that_fails_ends_its_description() -> None:
    hook = Hook()
    with pytest.raises(RuntimeError, match="out of resources"):
        launched(hook, tensor(1), fails=True)
    assert hook.said[-1] is None


def test_a_release_without_that_class_is_left_alone() -> None:
    triton_kernels._wrap(SimpleNamespace(), Hook())
