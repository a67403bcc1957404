"""Prices are those of the one cost model; what nobody described is said to be priced by its name."""

import json
from math import inf

import pytest

from lagom_emulate.clock import Clock, Operation
from lagom_emulate.prices import HOST_COPY_BYTES_PER_S, HOST_COPY_S, CostModelPrices, Doubt, PriceSource
from lagom_emulate.protocol import ProtocolError
from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, CommConfig, Protocol
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.operators.operator_constants import load_framework, load_operators
from lagom_overlap.hardware import load_preset
from lagom_overlap.sim import simulate_iteration
from lagom_overlap.workload import Access, Attention, CommOp, CompOp, Gemm, Iteration, MemoryBound

GEMM = {"gemm": {"m": 4096, "n": 4096, "k": 8192, "batch": 1, "dtype": "bf16"}}


def collective(**changed: object) -> dict[str, object]:
    fields = {
        "comm": "ab",
        "kind": "all_gather",
        "bytes": 64 << 20,
        "num_ranks": 8,
        "nodes": 1,
        "algorithm": "RING",
        "protocol": "SIMPLE",
        "num_channels": 8,
        "num_threads": 512,
        "chunk_bytes": 524288,
        "grid": 8,
    }
    return {"collective": fields | changed}


@pytest.fixture(scope="module")
def model() -> ContentionModel:
    return ContentionModel(load_preset("h100_dgx"), load_profile("plausible"))


@pytest.fixture
def prices(model: ContentionModel) -> CostModelPrices:
    return CostModelPrices(model)


def priced(prices: CostModelPrices, description: dict[str, object]):
    return prices.priced(json.dumps(description).encode())


def test_a_product_takes_what_the_model_says_of_its_shape(prices: CostModelPrices, model: ContentionModel) -> None:
    found = priced(prices, GEMM)
    assert found.alone_ns == pytest.approx(1e9 * model.kernel_seconds(model.kernel(Gemm(4096, 4096, 8192))))
    assert found.source is PriceSource.SHAPE


@pytest.mark.parametrize(
    ("formats", "width", "result_bytes"),
    [
        ({"dtype": "bfloat16"}, 2, None),
        ({"dtype": "float32"}, 4, None),
        ({"dtype": "tfloat32"}, 4, None),
        ({"dtype": "float8_e4m3fn", "result": "bfloat16"}, 1, 2),
        ({"dtype": "float8_e5m2", "result": "float32"}, 1, 4),
        ({"dtype": "float4_e2m1fn", "result": "bfloat16"}, 1, 2),
    ],
)
def test_a_product_takes_the_rate_of_its_operands_and_writes_its_result(
    prices: CostModelPrices, model: ContentionModel, formats: dict[str, str], width: int, result_bytes: int | None
) -> None:
    gemm = {"m": 4096, "n": 1024, "k": 8192, "batch": 1} | formats
    expected = model.kernel(Gemm(4096, 1024, 8192, width, result_bytes=result_bytes))
    assert priced(prices, {"gemm": gemm}).alone_ns == pytest.approx(1e9 * model.kernel_seconds(expected))


def test_a_kernel_that_rearranges_has_that_rate(prices: CostModelPrices, model: ContentionModel) -> None:
    found = priced(prices, {"kernel": "triton_poi_fused_t_0", "bytes": 1 << 30, "access": "rearrange"})
    expected = model.kernel_seconds(model.kernel(MemoryBound(1 << 30, Access.REARRANGE)))
    assert found.alone_ns == pytest.approx(1e9 * expected)
    assert expected > model.kernel_seconds(model.kernel(MemoryBound(1 << 30)))


def test_a_collective_takes_what_its_configuration_costs(prices: CostModelPrices, model: ContentionModel) -> None:
    def seconds(channels: int) -> float:
        config = CommConfig(
            algorithm=Algorithm.RING,
            protocol=Protocol.SIMPLE,
            num_channels=channels,
            num_threads=512,
            chunk_bytes=524288,
        )
        return model.collective(Collective(CollectiveKind.ALL_GATHER, 64 << 20, 8), config).seconds()

    for channels in (1, 8):
        found = priced(prices, collective(num_channels=channels))
        assert found.alone_ns == pytest.approx(1e9 * seconds(channels))
        assert (found.source, found.work.num_members) == (PriceSource.CONFIGURATION, 8)


def test_ranks_that_hosts_share_unevenly_pay_the_wire_between_them() -> None:
    model = ContentionModel(load_preset("h100_dgx", 2), load_profile("plausible"))
    prices = CostModelPrices(model)
    three, four = (priced(prices, collective(num_ranks=number, nodes=2)) for number in (3, 4))
    assert three.alone_ns == four.alone_ns > 2 * priced(prices, collective(num_ranks=3)).alone_ns
    assert three.work.num_members == 3


def test_the_ranks_of_a_collective_share_its_kind(prices: CostModelPrices) -> None:
    first, second = (priced(prices, collective(rank=rank)) for rank in (0, 1))
    assert first.work is second.work


def test_a_collective_that_the_model_has_no_word_for_runs_as_by_default(prices: CostModelPrices) -> None:
    assert priced(prices, collective(algorithm="SPIRAL")).source is PriceSource.DEFAULT


def test_a_kernel_is_priced_by_what_its_framework_says(prices: CostModelPrices, model: ContentionModel) -> None:
    kernel = {"kernel": "vectorized_elementwise_kernel", "grid": [9, 1, 1], "block": [128, 1, 1]}
    found = priced(prices, kernel | {"op": "aten::add", "bytes": 3 << 28})
    assert found.alone_ns == pytest.approx(1e9 * model.kernel_seconds(model.kernel(MemoryBound(3 << 28))))
    assert found.source is PriceSource.FRAMEWORK
    further = priced(prices, kernel | {"op": "aten::add", "part": 1})
    assert further.alone_ns < 1e-3 * found.alone_ns + 5000


def test_a_softmax_streams_its_rows_and_a_sum_reduces_them(prices: CostModelPrices, model: ContentionModel) -> None:
    for kernel, access in (("cunn_SoftMaxForward", Access.STREAM), ("reduce_kernel", Access.REDUCTION)):
        found = priced(prices, {"kernel": kernel, "bytes": 1 << 30})
        expected = model.kernel_seconds(model.kernel(MemoryBound(1 << 30, access)))
        assert found.alone_ns == pytest.approx(1e9 * expected)


def test_attention_is_priced_by_its_flops(prices: CostModelPrices) -> None:
    kernel = {"kernel": "flash_fwd_kernel", "grid": [64, 8, 32], "block": [128, 1, 1], "op": "aten::_flash_attention"}
    one, two = (priced(prices, kernel | {"flops": flops, "bytes": 1 << 20}) for flops in (4e12, 8e12))
    assert two.alone_ns == pytest.approx(2 * one.alone_ns, rel=0.01)
    rate = load_operators(load_preset("h100_dgx").gpu).attention_flops
    assert one.alone_ns == pytest.approx(4e12 / rate * 1e9, rel=0.01)


@pytest.mark.parametrize(("backward", "op"), [(False, "flash_attention"), (True, "flash_attention_backward")])
@pytest.mark.parametrize(("seq_len", "head_dim"), [(1024, 128), (8192, 128), (8192, 64)])
def test_attention_costs_what_a_simulated_step_has_it_cost(
    seq_len: int, head_dim: int, backward: bool, op: str
) -> None:
    """The framework that simulates and the operator that runs name one kernel, one length and one pass."""
    cluster = load_preset("h100_dgx")
    operators = load_operators(cluster.gpu).in_training().running(load_framework("torchtitan"))
    model = ContentionModel(cluster, load_profile("plausible"), None, operators)
    work = Attention(
        batch=2,
        num_heads=32,
        seq_len=seq_len,
        head_dim=head_dim,
        passes=2.5 if backward else 1.0,
        backward=backward,
    )
    described = {
        "kernel": "pytorch_flash::kernel",
        "grid": [seq_len // 128, 2, 32],
        "block": [128, 1, 1],
        "op": f"aten::_scaled_dot_product_{op}",
        "flops": work.flops,
        "head_dim": head_dim,
        "reach": float(seq_len),
    }
    found = priced(CostModelPrices(model), described)
    assert found.alone_ns == pytest.approx(1e9 * model.kernel_seconds(model.kernel(work)), rel=1e-3)


def test_a_kernel_that_nobody_describes_is_priced_by_name(prices: CostModelPrices, model: ContentionModel) -> None:
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>"
    found = priced(prices, {"kernel": name, "grid": [1, 1, 1], "block": [128, 1, 1], "num_elements": 1 << 26})
    assert found.source is PriceSource.NAME
    assert found.alone_ns == pytest.approx(1e9 * model.kernel_seconds(model.kernel(MemoryBound(4 << 26))))


def test_a_convolution_computes_as_its_product_does_and_moves_each_tensor_once(prices: CostModelPrices) -> None:
    """ResNet-50's second stage, 3x3, 128 images: as many products as a matrix product, whose memory has ninefold."""
    sizes = {"m": 128 * 56 * 56, "n": 64, "k": 576, "batch": 1, "dtype": "bfloat16"}
    moved = 2 * 2 * 128 * 64 * 56 * 56
    kernel = {"kernel": "emulated_convolution", "op": "aten::convolution", "grid": [132, 1, 1], "block": [256, 1, 1]}
    found = priced(prices, kernel | {"gemm": sizes, "bytes": moved})
    laid_out = priced(prices, {"gemm": sizes})
    flops = 2 * 128 * 56 * 56 * 64 * 576
    assert max(moved / 3.35e12, flops / 989e12) < found.alone_ns * 1e-9 < laid_out.alone_ns * 1e-9  # the chip's peaks
    assert (found.source, found.doubt, found.description.label) == (PriceSource.FRAMEWORK, None, "aten::convolution")
    # Deep layers are bound by their products: 512 channels, 7x7 places.
    deep = {"m": 1024 * 49, "n": 512, "k": 4608, "batch": 1, "dtype": "bfloat16"}
    whole = priced(prices, kernel | {"gemm": deep, "bytes": 2 * 2 * 1024 * 49 * 512})
    assert 2 * 1024 * 49 * 512 * 4608 / 989e12 < whole.alone_ns * 1e-9 < priced(prices, {"gemm": deep}).alone_ns * 1e-9
    wide = priced(prices, kernel | {"gemm": deep | {"dtype": "float32"}, "bytes": 4 * 2 * 1024 * 49 * 512})
    assert wide.alone_ns == pytest.approx(2 * whole.alone_ns, rel=0.1)


def test_an_operator_with_few_flops_takes_what_its_bytes_do(prices: CostModelPrices) -> None:
    kernel = {"kernel": "k", "grid": [1024, 1, 1], "block": [128, 1, 1], "op": "mine::op", "bytes": 1 << 30}
    assert priced(prices, kernel | {"flops": 1}).alone_ns == pytest.approx(priced(prices, kernel).alone_ns)
    assert priced(prices, kernel | {"flops": 10**13}).alone_ns > 5 * priced(prices, kernel).alone_ns


def test_kernels_on_symmetric_memory_pay_the_wire(prices: CostModelPrices, model: ContentionModel) -> None:
    """Two shots of 32 MiB over eight GPUs: 7/8 of it comes and 7/8 goes again, at 360 GB/s."""
    kernel = {"kernel": "two_shot", "grid": [24, 1, 1], "block": [512, 1, 1], "op": "symm_mem::two_shot_all_reduce_"}
    size = 32 << 20
    found = priced(prices, kernel | {"bytes": 2 * size, "wire_bytes": 2 * size * 7 / 8})
    assert found.alone_ns == pytest.approx(1e9 * 2 * size * 7 / 8 / 360e9, rel=0.05)
    small = priced(prices, kernel | {"bytes": 2048, "wire_bytes": 1792})
    assert small.alone_ns >= 1e9 * 2 * model.cluster.intra.hop_s


@pytest.mark.parametrize(
    ("said", "doubt"),
    [
        ({"op": "mine", "bytes": 1 << 20, "floor": True}, Doubt.FLOOR),
        ({"op": "aten::x", "bytes": 1 << 20, "uncounted": True}, Doubt.UNCOUNTED),
        ({"op": "aten::x", "uncounted": True}, Doubt.UNCOUNTED),
        ({}, Doubt.NAME),
        ({"op": "aten::x", "bytes": 1 << 20}, None),
    ],
)
def test_prices_to_be_doubted_are_known_as_such(prices: CostModelPrices, said: dict[str, object], doubt) -> None:
    assert priced(prices, {"kernel": "k", "grid": [1, 1, 1], "block": [32, 1, 1]} | said).doubt is doubt


def test_copies_take_their_wire(prices: CostModelPrices) -> None:
    found = priced(prices, {"copy": "h2d", "bytes": 1 << 30})
    assert found.alone_ns == pytest.approx(1e9 * (HOST_COPY_S + (1 << 30) / HOST_COPY_BYTES_PER_S))
    assert found.work.kind is None
    assert priced(prices, {"copy": "d2d", "bytes": 1 << 30}).work.kind is not None


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b'{"gemm": {"m": -1, "n": 1, "k": 1}}', b'{"collective": {}}'])
def test_what_is_no_description_is_refused(prices: CostModelPrices, text: bytes) -> None:
    with pytest.raises(ProtocolError, match="description"):
        prices.priced(text)


def test_events_and_marks_take_no_time(prices: CostModelPrices) -> None:
    for one in ({"event": "record"}, {"host_function": True}, {"mark": {"step": "begin"}}):
        found = priced(prices, one)
        assert (found.alone_ns, found.work.kind) == (0.0, None)


def test_one_gpus_overlap_is_that_of_lagom_simulate(model: ContentionModel) -> None:
    """Two products on one stream next to an all-gather on another: the same ends, to the digit's rounding."""
    config = CommConfig(
        algorithm=Algorithm.RING, protocol=Protocol.SIMPLE, num_channels=8, num_threads=512, chunk_bytes=524288
    )
    iteration = Iteration(
        name="two",
        ops=(
            CompOp(name="a", work=Gemm(4096, 4096, 8192)),
            CommOp(name="g", collective=Collective(CollectiveKind.ALL_GATHER, 64 << 20, 8)),
            CompOp(name="b", work=Gemm(4096, 4096, 8192)),
        ),
    )
    spans = {span.name: span for span in simulate_iteration(iteration, {"g": config}, model).spans}
    prices = CostModelPrices(model)
    clock, found = Clock(prices.set_times), {}
    for gpu in range(8):
        for number, (name, stream) in enumerate((("a", 0), ("g", 1), ("b", 0)), 1):
            text = json.dumps(collective(rank=gpu) if name == "g" else GEMM).encode()
            operation = Operation(gpu, number, gpu, prices.work(text), 0.0, stream=stream)
            clock.submit(operation, instance=("ab", 1) if name == "g" else None)
            found[gpu, name] = operation
    while clock.next_ns() < inf:
        clock.step()
    for (_, name), operation in found.items():
        assert operation.end_ns == pytest.approx(1e9 * spans[name].end_s, rel=1e-12)
