"""Every rule against the operator itself: run whole, run in pieces, put together, compare."""

import math

import pytest

torch = pytest.importorskip("torch")

from lagom_overlap.capturing.shard_rules import ShardRule, shard_rule  # noqa: E402
from lagom_overlap.workload import Gather, Reduce  # noqa: E402

pytestmark = pytest.mark.torch

aten = torch.ops.aten


def rand(*shape: int) -> "torch.Tensor":
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(math.prod(shape)))


def ids(*shape: int) -> "torch.Tensor":
    return torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(1))


Q, K = rand(2, 4, 6, 8), rand(2, 2, 6, 8)
OUT, LSE = aten._scaled_dot_product_flash_attention_for_cpu(Q, K.repeat(1, 2, 1, 1), K.repeat(1, 2, 1, 1), 0.0, True)
NORMED = aten.native_layer_norm(rand(4, 6, 8), [8], rand(8), rand(8), 1e-5)

CASES = {
    "mm": (aten.mm.default, (rand(4, 6), rand(6, 8)), {}),
    "mm transposed": (aten.mm.default, (rand(6, 4).t(), rand(8, 6).t()), {}),
    "addmm": (aten.addmm.default, (rand(8), rand(4, 6), rand(6, 8)), {}),
    "addmm full": (aten.addmm.default, (rand(4, 8), rand(4, 6), rand(6, 8)), {}),
    "bmm": (aten.bmm.default, (rand(2, 4, 6), rand(2, 6, 8)), {}),
    "baddbmm": (aten.baddbmm.default, (rand(2, 1, 8), rand(2, 4, 6), rand(2, 6, 8)), {}),
    "add broadcast": (aten.add.Tensor, (rand(4, 6, 8), rand(6, 1)), {}),
    "mul scalar": (aten.mul.Tensor, (rand(4, 6), 3.0), {}),
    "silu": (aten.silu.default, (rand(4, 6),), {}),
    "gelu_backward": (aten.gelu_backward.default, (rand(4, 6), rand(4, 6)), {}),
    "threshold_backward": (aten.threshold_backward.default, (rand(4, 6), rand(4, 6), 0), {}),
    "where": (aten.where.self, (rand(4, 6) > 0, rand(4, 6), rand(6)), {}),
    "_to_copy": (aten._to_copy.default, (rand(4, 6),), {"dtype": torch.float32}),
    "clone": (aten.clone.default, (rand(4, 6),), {}),
    "_softmax": (aten._softmax.default, (rand(4, 6, 8), -1, False), {}),
    "_log_softmax": (aten._log_softmax.default, (rand(4, 6), 1, False), {}),
    "_softmax_backward_data": (
        aten._softmax_backward_data.default,
        (rand(4, 6), torch.softmax(rand(4, 6), 1), 1, torch.float64),
        {},
    ),
    "cumsum": (aten.cumsum.default, (rand(4, 6), 0), {}),
    "native_layer_norm": (aten.native_layer_norm.default, (rand(4, 6, 8), [8], rand(8), rand(8), 1e-5), {}),
    "native_layer_norm_backward": (
        aten.native_layer_norm_backward.default,
        (rand(4, 6, 8), rand(4, 6, 8), [8], NORMED[1], NORMED[2], rand(8), rand(8), [True, False, False]),
        {},
    ),
    "_fused_rms_norm": (aten._fused_rms_norm.default, (rand(4, 6, 8), [8], rand(8), 1e-5), {}),
    "sum": (aten.sum.default, (rand(4, 6),), {}),
    "sum dim": (aten.sum.dim_IntList, (rand(4, 6, 8), [0, 2], True), {}),
    "sum dropped": (aten.sum.dim_IntList, (rand(4, 6, 8), [1]), {}),
    "mean": (aten.mean.dim, (rand(4, 6, 8), [-1], True), {}),
    "amax": (aten.amax.default, (rand(4, 6, 8), [1]), {}),
    "attention causal": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (rand(2, 4, 6, 8), rand(2, 4, 6, 8), rand(2, 4, 6, 8), 0.0, True),
        {},
    ),
    "attention whole": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        (rand(2, 4, 6, 8), rand(2, 4, 4, 8), rand(2, 4, 4, 8)),
        {},
    ),
    "attention backward": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        (rand(2, 4, 6, 8), Q, K.repeat(1, 2, 1, 1), K.repeat(1, 2, 1, 1), OUT, LSE, 0.0, True),
        {},
    ),
    "embedding": (aten.embedding.default, (rand(12, 8), ids(4, 6)), {}),
    "embedding backward": (
        aten.embedding_dense_backward.default,
        (rand(4, 6, 8), ids(4, 6), 12, -1, False),
        {},
    ),
    "cat": (aten.cat.default, ([rand(4, 2, 6), rand(4, 4, 6)], 1), {}),
    "slice_backward": (aten.slice_backward.default, (rand(4, 2, 8), [4, 6, 8], 1, 2, 4, 1), {}),
    "convolution": (
        aten.convolution.default,
        (rand(4, 4, 6, 6), rand(8, 4, 3, 3), rand(8), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        {},
    ),
    "convolution no bias": (
        aten.convolution.default,
        (rand(4, 4, 6, 6), rand(8, 4, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
        {},
    ),
}


def _rule(func: "torch._ops.OpOverload", args: tuple, kwargs: dict) -> tuple[ShardRule | None, tuple]:
    result = func(*args, **kwargs)
    outputs = result if isinstance(result, tuple) else (result,)
    names = [argument.name for argument in func._schema.arguments]
    return shard_rule(func, {**dict(zip(names, args, strict=False)), **kwargs}, outputs), outputs


def _piece(value: object, rule: ShardRule, axis: int, number: int, num: int) -> object:
    """An argument with its tensors cut as the rule says."""
    if isinstance(value, list):
        return [_piece(one, rule, axis, number, num) for one in value]
    for tensor, axes in rule.inputs:
        if tensor is value and axis in axes:
            return tensor.chunk(num, axes.index(axis))[number]
    return value


def _sized(name: str, args: tuple, axis: int, rule: ShardRule, num: int) -> tuple:
    """Sizes among the arguments (of a gradient's whole) follow the piece."""
    if name != "slice_backward":
        return args
    sizes = list(args[1])
    sizes[rule.combine[axis].dim] //= num
    return (args[0], sizes, *args[2:])


@pytest.mark.parametrize("name", CASES)
def test_pieces_put_together_equal_the_whole(name: str) -> None:
    func, args, kwargs = CASES[name]
    rule, whole = _rule(func, args, kwargs)
    assert rule is not None
    for axis, combine in enumerate(rule.combine):
        for num in {n for n in (2, 3, rule.sizes[axis]) if rule.sizes[axis] % n == 0}:
            pieces = []
            for number in range(num):
                part = [_piece(arg, rule, axis, number, num) for arg in _sized(name, args, axis, rule, num)]
                result = func(*part, **kwargs)
                pieces.append(result if isinstance(result, tuple) else (result,))
            for place, output in enumerate(whole):
                if output is None:
                    continue
                parts = [piece[place] for piece in pieces]
                joined = torch.cat(parts, combine.dim) if isinstance(combine, Gather) else sum(parts)
                torch.testing.assert_close(joined, output)


@pytest.mark.parametrize(
    ("name", "combine", "sizes"),
    [
        ("mm", (Gather(0), Reduce(), Gather(1)), (4, 6, 8)),
        ("addmm", (Gather(0), Gather(1)), (4, 8)),
        ("_softmax", (Gather(0), Gather(1)), (4, 6)),
        ("native_layer_norm", (Gather(0), Gather(1)), (4, 6)),
        ("attention causal", (Gather(0), Gather(1)), (2, 4)),
        ("attention whole", (Gather(0), Gather(1), Gather(2)), (2, 4, 6)),
        ("sum dropped", (Gather(0), Reduce(), Gather(1)), (4, 6, 8)),
        ("embedding backward", (Reduce(), Reduce(), Gather(1)), (4, 6, 8)),
        ("cat", (Gather(0), Gather(2)), (4, 6)),
    ],
)
def test_axes_are_those_of_the_specification(name: str, combine: tuple, sizes: tuple) -> None:
    rule, _ = _rule(*CASES[name])
    assert rule is not None
    assert (rule.combine, rule.sizes) == (combine, sizes)


@pytest.mark.parametrize("name", ["mm", "addmm", "addmm full", "baddbmm"])
def test_the_first_factor_of_a_product_comes_first(name: str) -> None:
    """The rewrites tell m from n by it: cutting the columns of a biased product must halve n, not m."""
    func, args, kwargs = CASES[name]
    rule, _ = _rule(func, args, kwargs)
    assert rule is not None
    factor = args[0] if name == "mm" else args[1]
    assert rule.inputs[0][0] is factor
    rows = next(axis for axis, combine in enumerate(rule.combine) if combine == Gather(factor.dim() - 2))
    columns = next(axis for axis, combine in enumerate(rule.combine) if combine == Gather(factor.dim() - 1))
    assert (rows in rule.inputs[0][1], columns in rule.inputs[0][1]) == (True, False)


def test_grouped_keys_bound_the_pieces_along_heads() -> None:
    query, key = rand(1, 8, 4, 2), rand(1, 2, 4, 2)
    arguments = {"query": query, "key": key, "value": key, "is_causal": True}
    func = aten._scaled_dot_product_flash_attention_for_cpu.default
    rule = shard_rule(func, arguments, (query, rand(1, 8, 4)))
    assert rule is not None
    assert rule.sizes == (2,)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.relu_.default, (rand(4, 6),)),
        (aten.native_dropout.default, (rand(4, 6), 0.5, True)),
        (aten.randn_like.default, (rand(4, 6),)),
        (
            aten.native_layer_norm_backward.default,
            (rand(4, 6, 8), rand(4, 6, 8), [8], NORMED[1], NORMED[2], rand(8), rand(8), [True, True, True]),
        ),
        (aten.sort.default, (rand(4, 6), 1)),
    ],
)
def test_what_cannot_be_cut_has_no_rule(func: "torch._ops.OpOverload", args: tuple) -> None:
    assert _rule(func, args, {})[0] is None


@pytest.mark.parametrize("view", [lambda x: x.view(12, 4), lambda x: x.transpose(0, 2), lambda x: x.view(2, 2, 3, 4)])
def test_a_view_of_a_piece_is_a_piece_of_the_view(view: object) -> None:
    base = torch.arange(48).view(2, 6, 4)
    whole = view(base)
    rule = shard_rule(aten.view.default, {"self": base}, (whole,))
    assert rule is not None
    for axis, combine in enumerate(rule.combine):
        dim = rule.inputs[0][1].index(axis)
        for number in range(2):
            piece, expected = base.chunk(2, dim)[number], whole.chunk(2, combine.dim)[number]
            assert sorted(piece.flatten().tolist()) == sorted(expected.flatten().tolist())


def _gathered(parts: list) -> "torch.Tensor":
    return torch.cat(parts)


def _by_rank(pieces: list, ranks: int) -> "torch.Tensor":
    """Pieces of a gathered tensor: within every rank's part."""
    return torch.cat([torch.cat([piece.chunk(ranks)[rank] for piece in pieces]) for rank in range(ranks)])


def test_a_gather_in_pieces_is_the_gather() -> None:
    ranks, num = 3, 2
    given = [rand(4, 6) + rank for rank in range(ranks)]
    whole = _gathered(given)
    func = torch.ops._c10d_functional.all_gather_into_tensor.default
    rule = shard_rule(func, {"input": given[0]}, (whole,))
    assert rule is not None
    assert (rule.combine, rule.sizes) == ((Gather(0), Gather(1)), (4, 6))
    rows = [_gathered([tensor.chunk(num)[k] for tensor in given]) for k in range(num)]
    columns = [_gathered([tensor.chunk(num, 1)[k] for tensor in given]) for k in range(num)]
    assert torch.equal(_by_rank(rows, ranks), whole)
    assert torch.equal(torch.cat(columns, 1), whole)


def test_a_reduction_in_pieces_of_each_rank_is_the_reduction() -> None:
    ranks, num = 3, 2
    given = [rand(12, 6) * (rank + 1) for rank in range(ranks)]
    whole = sum(given).chunk(ranks)[1]
    rule = shard_rule(torch.ops._c10d_functional.reduce_scatter_tensor.default, {"input": given[0]}, (whole,))
    assert rule is not None
    assert rule.sizes == (4, 6)
    parts = [
        sum(torch.cat([part.chunk(num)[k] for part in tensor.chunk(ranks)]) for tensor in given).chunk(ranks)[1]
        for k in range(num)
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


def test_an_uneven_exchange_is_cut_beside_its_first_dimension_only() -> None:
    tensor = rand(6, 4)
    func = torch.ops._c10d_functional.all_to_all_single.default
    even = shard_rule(func, {"input": tensor, "output_split_sizes": [3, 3], "input_split_sizes": [3, 3]}, (tensor,))
    uneven = shard_rule(func, {"input": tensor, "output_split_sizes": [3, 3], "input_split_sizes": [2, 4]}, (tensor,))
    assert even is not None
    assert even.sizes == (4, 3)
    assert even.combine == (Gather(1), Gather(0))  # rows last: the others are numbered alike on all ranks
    assert uneven is not None
    assert uneven.combine == (Gather(1),)
