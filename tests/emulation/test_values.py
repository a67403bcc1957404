"""Values of emulated tensors, with this machine's memory for a GPU's and operators that leave nothing behind."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from lagom_emulate.values import MAX_ELEMENTS, UncomputedValueError, Values  # noqa: E402

pytestmark = pytest.mark.torch
aten = torch.ops.aten


class Device:
    """Counts launches; a collective owes floats until somebody may wait for it."""

    def __init__(self) -> None:
        self.num_launches = 0
        self.owes = False
        self.counts: list[int] = []
        self.refusals: list[str] = []

    def inexact_launches(self) -> int:
        return self.num_launches

    def settle(self, address: int, num_bytes: int, *, may_wait: bool) -> bool:
        self.owes = self.owes and not may_wait
        return not self.owes

    @contextlib.contextmanager
    def counted(self, number: int) -> Iterator[None]:
        self.counts.append(number)
        yield

    def clear(self, address: int, num_bytes: int) -> None:
        ctypes.memset(address, 0, num_bytes)

    def refuse(self, text: str) -> None:
        self.refusals.append(text)


class OnHost(Values):
    def _on_gpu(self, tensor) -> bool:
        return not hasattr(tensor, "is_hosts")

    def _is_capturing(self) -> bool:
        return False


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def saves() -> list[str]:
    """What was said of checkpoints."""
    return []


@pytest.fixture
def run(device: Device, saves: list[str]) -> Callable[..., object]:
    def fail(operator: str, error: BaseException) -> None:
        raise error

    values = OnHost(torch, device, fail, lambda: saves.append("zeros"))

    def launch(func, *args, **kwargs):
        def call():
            """The GPU's operator: right in shape, wrong in values; the device copies itself."""
            if func is aten.copy_.default:
                return func(*args)
            device.num_launches += 1
            if func._schema.is_mutable:
                return args[0]
            made = func(*args, **kwargs)
            for tensor in made if isinstance(made, tuple) else [made]:
                if isinstance(tensor, torch.Tensor):
                    tensor.fill_(9)
            return made

        return values.run(func, args, kwargs, call)

    launch.values = values
    return launch


def test_what_is_small_has_the_cpus_values(run) -> None:
    x = torch.randn(30, 7)
    values, indices = run(aten.sort.default, x)
    assert torch.equal(values, x.sort().values)
    assert torch.equal(indices, x.sort().indices)


def test_what_is_written_in_place_is_written_once(run) -> None:
    x, y = torch.randn(50), torch.randn(50)
    expected = x + 2 * y
    assert run(aten.add_.Tensor, x, y, alpha=2) is x
    assert torch.equal(x, expected)


def test_sizes_that_follow_from_values_are_right(run) -> None:
    x = torch.randint(0, 5, (400,))
    assert torch.equal(run(aten.nonzero.default, x), x.nonzero())
    assert torch.equal(run(aten.index.Tensor, x, [x > 2]), x[x > 2])


def test_operators_that_size_their_results_count_what_there_is(run, device) -> None:
    numbers = torch.tensor([5, 0, 2, 5, 0, 1])
    mask = numbers > 0
    run(aten.nonzero.default, numbers)
    run(aten.masked_select.default, numbers, mask)
    run(aten.index.Tensor, torch.ones(3, 6), [None, mask])
    run(aten._unique2.default, numbers)
    run(aten.repeat_interleave.Tensor, numbers)
    assert device.counts == [4, 4, 4, 4, 13]
    run(aten.bincount.default, numbers)  # by its greatest number
    run(aten.equal.default, numbers, numbers + 1)
    assert device.counts[5:] == [5, 0]


def test_sizes_by_values_that_nobody_computed_are_refused_by_name(run) -> None:
    logits = run(aten.mm.default, torch.randn(2048, 256), torch.randn(256, 8))
    chosen = run(aten.argmax.default, logits, 1)
    with pytest.raises(UncomputedValueError, match=r"aten::bincount would read what aten::mm left"):
        run(aten.bincount.default, chosen)


def test_whole_numbers_that_nobody_computed_are_not_read_but_floats_are(run) -> None:
    large = run(aten.sort.default, torch.randn(MAX_ELEMENTS))
    with pytest.raises(UncomputedValueError, match=r"aten::sort"):
        run(aten._local_scalar_dense.default, large[1][:1])
    assert run(aten._local_scalar_dense.default, large[0][:1]) == 0


def test_a_flag_that_nobody_computed_says_no(run) -> None:
    """DeepSpeed's: whether any gradient is infinite, as a byte."""
    large = run(aten.sort.default, torch.randn(MAX_ELEMENTS))[0]
    flag = run(aten._to_copy.default, run(aten.any.default, large), dtype=torch.uint8)
    assert run(aten._local_scalar_dense.default, flag) == 0


def test_a_checkpoint_of_what_nobody_computed_has_zeros_and_says_so_once(run, saves) -> None:
    large = run(aten.sort.default, torch.randn(MAX_ELEMENTS))
    saver = eval("lambda save: save()", {"__name__": "safetensors.torch"})
    for uncomputed in large:
        kept = torch.ones_like(uncomputed)
        kept.is_hosts = True
        saver(lambda kept=kept, uncomputed=uncomputed: run(aten.copy_.default, kept, uncomputed))
        assert kept.count_nonzero() == 0
    assert saves == ["zeros"]


def test_a_checkpoint_has_what_was_computed(run, saves) -> None:
    kept, small = torch.zeros(30), run(aten.neg.default, torch.ones(30))
    kept.is_hosts = True
    eval("lambda save: save()", {"__name__": "torch.serialization"})(lambda: run(aten.copy_.default, kept, small))
    assert torch.equal(kept, torch.full((30,), -1.0))
    assert not saves


def test_memory_that_is_written_anew_is_known_again(run) -> None:
    large = run(aten.sort.default, torch.randn(MAX_ELEMENTS))[1]
    run(aten.copy_.default, large, torch.zeros_like(large))
    assert (
        run(aten.nonzero.default, large).numel() == 0
    )  # the operator's nines: the device copies itself, not this test's


def test_floats_that_a_collective_owes_are_waited_for_only_if_they_are_few(run, device) -> None:
    device.owes, many = True, torch.randn(1000)
    assert run(aten.neg.default, many)[0].item() == 0
    device.owes, few = True, torch.randn(3)
    assert torch.equal(run(aten.neg.default, few), -few)


def test_what_a_collective_owes_to_memory_that_was_taken_again_does_not_come_over_what_is_written(device) -> None:
    """PyTorch frees a tensor whose all-reduce nobody waited for, and has the next operator's result there."""
    taken, x = torch.zeros((), dtype=torch.int64), torch.tensor([163])
    owed = [taken.data_ptr()]

    def settle(address: int, num_bytes: int, *, may_wait: bool) -> bool:
        if address in owed and may_wait:
            owed.remove(address)
            taken.fill_(7)
        return address not in owed

    def launch():
        device.num_launches += 1
        return taken

    device.settle = settle
    values = OnHost(torch, device, pytest.fail, pytest.fail)
    result = values.run(aten.sum.default, (x,), {}, launch)
    settle(result.data_ptr(), 8, may_wait=True)  # as whoever reads it does
    assert result.item() == 163


def test_random_numbers_leave_the_cpus_sequence_alone(run, monkeypatch) -> None:
    class Generator:
        initial_seed, get_offset = (lambda self: 5), (lambda self: 8)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),), raising=False)
    state = torch.get_rng_state()
    drawn = run(aten.uniform_.default, torch.zeros(100))
    assert torch.equal(torch.get_rng_state(), state)
    assert 0.2 < drawn.mean().item() < 0.8


def test_what_nobody_computed_is_zero_and_what_is_changed_in_place_stays(run, device) -> None:
    large = torch.ones(MAX_ELEMENTS)
    mask = run(aten.gt.Scalar, large, 2)  # the GPU's operator leaves nines, as reused memory would
    assert mask.count_nonzero() == 0
    assert run(aten._local_scalar_dense.default, run(aten.any.default, mask)) is False
    assert run(aten.normal_.default, torch.full((MAX_ELEMENTS + 1,), 7.0)).count_nonzero() == 0
    assert run(aten.mul_.Tensor, large, large)[0] == 1
    out = torch.full((MAX_ELEMENTS,), 7.0)
    run(aten.add.out, large, large, out=out)
    assert out.count_nonzero() == 0
    assert device.refusals == []


def test_a_part_of_a_larger_tensor_takes_no_neighbour_with_it(run) -> None:
    whole = torch.full((MAX_ELEMENTS, 2), 7.0)
    run(aten.normal_.default, whole[:, 0])
    assert (whole[:, 1] == 7).all()


def test_a_loop_that_waits_for_what_nobody_computed_is_named_and_ended(run, device, monkeypatch) -> None:
    monkeypatch.setattr("lagom_emulate.uncomputed_reads.MAX_READS", 50)
    large, number = torch.ones(MAX_ELEMENTS), 0

    def wait() -> None:
        nonlocal number
        while not run(aten._local_scalar_dense.default, run(aten.any.default, run(aten.gt.Scalar, large, 0))):
            number += 1

    with pytest.raises(UncomputedValueError, match=r"test_values.py:\d+ has read 50 truth values that nobody computed"):
        wait()
    assert number == 49
    assert len(device.refusals) == 1


def test_a_step_begins_the_count_of_reads_anew_and_computed_truth_is_not_counted(run, device, monkeypatch) -> None:
    monkeypatch.setattr("lagom_emulate.uncomputed_reads.MAX_READS", 5)
    # Before any is marked: memory that is freed and taken again outside of the operators keeps its mark.
    few, large = torch.ones(3), torch.ones(MAX_ELEMENTS)
    for _ in range(20):
        run(aten._local_scalar_dense.default, run(aten.any.default, run(aten.gt.Scalar, large, 0)))
        run.values.progressed()
    for _ in range(20):
        assert run(aten._local_scalar_dense.default, run(aten.any.default, few)) is True
    assert device.refusals == []


def test_large_tensors_are_unequal_as_nobody_compared_them(run, device) -> None:
    large = torch.ones(MAX_ELEMENTS)
    run(aten.equal.default, large, large.clone())
    assert device.counts == [0]


def test_an_error_of_ours_in_an_operator_leaves_the_others_their_values(device) -> None:
    said: list[str] = []
    values = OnHost(torch, device, lambda operator, error: said.append(operator), lambda: None)
    sparse = torch.eye(3).to_sparse()
    for _ in range(2):
        values.run(aten.neg.default, (sparse,), {}, lambda: sparse)  # has no storage to be known by
    assert said == ["aten::neg"]

    def launch():
        device.num_launches += 1
        return torch.full((3,), 9.0)

    assert values.run(aten.add.Tensor, (torch.ones(3), torch.ones(3)), {}, launch).tolist() == [2, 2, 2]
