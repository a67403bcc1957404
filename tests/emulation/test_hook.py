"""Bytes and flops of operators, worked by hand on fake tensors, and what reaches the device."""

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from lagom_emulate.hook import Hook, _mode_class  # noqa: E402
from lagom_emulate.operator_bytes import bytes_of  # noqa: E402
from lagom_emulate.operator_flops import Formulas  # noqa: E402
from lagom_emulate.operator_outputs import Outputs  # noqa: E402

pytestmark = pytest.mark.torch
aten = torch.ops.aten
MIB = 1 << 20


class RecordingDevice:
    def __init__(self) -> None:
        self.said: list[dict[str, object] | None] = []
        self.marks: list[dict[str, object]] = []

    def describe_next(self, fields) -> None:
        self.said.append(fields)

    def mark(self, fields) -> None:
        self.marks.append(fields)


@pytest.fixture
def mode():
    with FakeTensorMode(allow_non_fake_inputs=True) as found:
        yield found


def gpu(*shape: int, dtype=torch.bfloat16):
    return torch.empty(*shape, device="cuda", dtype=dtype)


def scores():
    """Of 1,024 rows and 500 classes, with their targets."""
    return gpu(1024, 500), gpu(1024, dtype=torch.int64)


def pair(*shape: int):
    return gpu(*shape), gpu(*shape)


def places():
    return gpu(512, dtype=torch.int64)


def mask():
    return gpu(1024, 1024, dtype=torch.bool)


@pytest.mark.parametrize(
    ("operator", "make", "num_bytes"),
    [
        (aten.add.Tensor, lambda: (gpu(MIB), gpu(MIB)), 6 * MIB),
        (aten.add_.Tensor, lambda: (gpu(MIB), gpu(MIB)), 6 * MIB),
        (aten.copy_.default, lambda: (gpu(MIB, dtype=torch.float32), gpu(MIB)), 6 * MIB),
        (aten.zero_.default, lambda: (gpu(MIB),), 2 * MIB),
        (aten.cat.default, lambda: ([gpu(MIB), gpu(MIB)],), 8 * MIB),
        (aten.sum.default, lambda: (gpu(MIB),), 2 * MIB),
        (aten.embedding.default, lambda: (gpu(1000, 512), gpu(2048, dtype=torch.int64)), 4 * MIB),
        (aten._foreach_mul_.Scalar, lambda: ([gpu(MIB), gpu(MIB)], 2.0), 8 * MIB),
        (aten._foreach_copy_.default, lambda: ([gpu(MIB)], [gpu(MIB, dtype=torch.float32)]), 6 * MIB),
        (aten.nll_loss_forward.default, lambda: (*scores(), None, 1, -100), 1024 * (2 + 8)),
        (aten.nll_loss_backward.default, lambda: (gpu(1), *scores(), None, 1, -100, gpu(1)), 1024 * (2 + 8)),
        # Rows of 32 KiB fit into a block's shared memory, rows of 64 KiB do not.
        (aten._log_softmax.default, lambda: (gpu(64, 16384), 1, False), 4 * MIB),
        (aten._log_softmax.default, lambda: (gpu(32, 32768), 1, False), 8 * MIB),
        (aten._log_softmax_backward_data.default, lambda: (*pair(64, 16384), 1, torch.bfloat16), 6 * MIB),
        (aten._log_softmax_backward_data.default, lambda: (*pair(32, 32768), 1, torch.bfloat16), 8 * MIB),
        # Two indices of 512 places in a table: 512 elements, or as many rows of 1,024.
        (aten.index_put_.default, lambda: (gpu(1024, 1024), [places(), places()], gpu(512)), 512 * (16 + 4)),
        (aten.index_put_.default, lambda: (gpu(1024, 1024), [places()], gpu(512, 1024)), 512 * (8 + 4096)),
        (aten.index_put_.default, lambda: (gpu(1024, 1024), [mask()], gpu(1)), 3 * MIB + 2),
        (aten.relu.default, lambda: (torch.empty(MIB),), None),
    ],
)
def test_bytes_are_what_is_read_and_written(mode, operator, make, num_bytes) -> None:
    assert bytes_of(torch, operator, make(), {}) == num_bytes


def test_a_cast_writes_the_new_type_and_a_new_tensor_only_itself(mode) -> None:
    assert bytes_of(torch, aten._to_copy.default, (gpu(MIB),), {"dtype": torch.float32}) == 6 * MIB
    options = {"dtype": torch.float32, "device": torch.device("cuda")}
    assert bytes_of(torch, aten.zeros.default, ([1024, 1024],), options) == 4 * MIB
    assert bytes_of(torch, aten.zeros.default, ([1024, 1024],), {"dtype": torch.float32}) is None


def described(operator, *args) -> dict[str, object] | None:
    device = RecordingDevice()
    Hook(torch, device).run(operator, args, {})
    assert device.said in ([], [device.said[0] if device.said else None, None])
    return device.said[0] if device.said else None


def test_causal_attention_has_half_the_flops(mode) -> None:
    query, key, value = (gpu(1, 8, 4096, 128) for _ in range(3))
    operator = aten._scaled_dot_product_flash_attention.default
    full, half = (described(operator, query, key, value, 0.0, causal) for causal in (False, True))
    assert full is not None
    assert half is not None
    assert full["flops"] == 4 * 8 * 4096**2 * 128
    assert half["flops"] == full["flops"] / 2
    # Without a mask a query sees as many keys as in a causal sequence of twice the length.
    assert [(one["head_dim"], one["reach"]) for one in (full, half)] == [(128, 8192), (128, 4096)]


def test_queries_that_share_keys_count_by_their_own_heads(mode) -> None:
    """PyTorch 2.10's counter refuses them; forward two products, backward five."""
    query, key, value = gpu(1, 32, 4096, 128), gpu(1, 8, 4096, 128), gpu(1, 8, 4096, 128)
    forward = described(aten._scaled_dot_product_flash_attention.default, query, key, value, 0.0, True)
    assert forward is not None
    assert forward["flops"] == 2 * 32 * 4096**2 * 128
    logsumexp, empty = gpu(1, 32, 4096, dtype=torch.float32), gpu(0)
    counted = (gpu(1, 32, 4096, 128), query, key, value, gpu(1, 32, 4096, 128), logsumexp, empty, empty, 4096, 4096)
    backward = described(aten._scaled_dot_product_flash_attention_backward.default, *counted, 0.0, True, empty, empty)
    assert backward is not None
    assert backward["flops"] == 2.5 * forward["flops"]
    assert (backward["head_dim"], backward["reach"]) == (128, 4096)


def test_products_and_views_are_left_to_others(mode) -> None:
    assert described(aten.mm.default, gpu(64, 64), gpu(64, 64)) is None
    assert described(aten.view.default, gpu(64, 64), [4096]) is None
    assert described(aten.relu.default, gpu(MIB)) == {"op": "aten::relu", "bytes": 4 * MIB}


def test_optimizers_in_a_row_begin_one_step(mode) -> None:
    device = RecordingDevice()
    hook = Hook(torch, device)
    hook._sees_backward = hook._has_backward = True
    hook._after_update()
    hook._after_update()
    assert device.marks == [{"step": "begin"}]
    hook._has_backward = True
    hook._after_update()
    assert len(device.marks) == 2


def test_an_error_of_ours_concerns_its_operator_and_is_one_line_and_never_the_jobs(
    mode, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.flop_counter import flop_registry

    monkeypatch.setitem(flop_registry, aten.relu, lambda *_, **__: 1 // 0)
    device = RecordingDevice()
    hook = Hook(torch, device)
    for _ in range(2):
        assert hook.run(aten.relu.default, (gpu(16),), {}).shape == (16,)
        hook.run(aten.neg.default, (gpu(16),), {})
    broken = {"op": "aten::relu", "bytes": 64, "uncounted": True}
    assert [said for said in device.said if said] == [broken, {"op": "aten::neg", "bytes": 64}] * 2
    assert capfd.readouterr().err.count("aten::relu is not described") == 1


def test_a_formula_that_looks_at_the_result_is_given_its_sizes(mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch calls formulas behind the operator, with its result; here nothing has run yet."""
    from torch.utils.flop_counter import flop_registry, shape_wrapper

    def of_shapes(signal, *_, out_shape=None, **__):
        return 3 * out_shape[0] if out_shape else 0

    monkeypatch.setitem(flop_registry, aten.relu, shape_wrapper(of_shapes))
    monkeypatch.setitem(flop_registry, aten.max, lambda *_, out_val, **__: sum(each.numel() for each in out_val))
    assert described(aten.relu.default, gpu(16, 4)) == {"op": "aten::relu", "bytes": 256, "flops": 48}
    found = described(aten.max.dim, gpu(16, 4), 1)
    assert found is not None
    assert found["flops"] == 32
    # Every formula of PyTorch's own that reads a result: none of them is asked without.
    signal, weight = gpu(8, 64, 56, 56), gpu(128, 64, 3, 3)
    forward = (signal, weight, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)
    counted = Hook(torch, RecordingDevice())._formulas.fields(aten.convolution.default, forward, {})
    assert counted["flops"] == 2 * 8 * 28 * 28 * 128 * 64 * 9
    behind = (gpu(8, 128, 28, 28), signal, weight, [0], *forward[3:], [True, True, False])
    backward = Hook(torch, RecordingDevice())._formulas.fields(aten.convolution_backward.default, behind, {})
    assert backward["flops"] == 2 * counted["flops"]


def test_lengths_of_packed_sequences_are_read_on_the_host_or_taken_for_the_longest() -> None:
    with FakeTensorMode():
        query, ends = gpu(300, 8, 64), gpu(3, dtype=torch.int32)
    known = torch.tensor([0, 100, 300], dtype=torch.int32)
    call = (query, query, query, ends, ends, 200, 200, 0.0, False, False)
    for lengths, flops in ((known, 4 * 8 * 64 * (100**2 + 200**2)), (None, 4 * 8 * 64 * 2 * 200**2)):
        formulas = Formulas(torch, Outputs(torch), lambda _, lengths=lengths: lengths)
        assert formulas.fields(aten._flash_attention_forward.default, call, {})["flops"] == flops


def test_a_higher_order_operator_runs_as_without_the_mode() -> None:
    """DTensor draws its random numbers by one; the mode had no rule for it."""
    from torch._prims.rng_prims import run_and_save_rng_state

    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with _mode_class(Hook(torch, RecordingDevice()))():
        _, drawn = run_and_save_rng_state(aten.rand.default, [3], device=torch.device("cpu"))
    assert torch.equal(drawn, expected)


def test_a_replayed_graph_stands_for_its_backward_pass() -> None:
    class Graph:
        num_replays = 0

        def replay(self) -> None:
            self.num_replays += 1

    device, graph = RecordingDevice(), Graph()
    hook = Hook(torch, device)
    hook._count_replays(Graph)
    for _ in range(3):
        graph.replay()
        hook._after_update()
        hook._after_update()  # a second optimizer of the same step
    assert graph.num_replays == 3
    assert device.marks == [{"step": "begin"}] * 3


def test_a_backward_pass_on_the_main_thread_is_seen() -> None:
    """torchtitan counts its container of optimizers as one more; only a backward pass makes the next step."""
    device = RecordingDevice()
    hook = Hook(torch, device)
    weight = torch.ones(3, requires_grad=True)
    with _mode_class(hook)():
        for _ in range(2):
            weight.square().sum().backward()
            hook._after_update()
            hook._after_update()
    assert len(device.marks) == 2
