"""What is told of Inductor's kernels, worked by hand, on stand-ins of its classes."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from lagom_emulate import inductor

FORWARD = "triton_tem_fused_flex_attention_0"
BACKWARD = "triton_tem_fused_flex_attention_backward_1"


def tensor(*shape: int) -> SimpleNamespace:
    return SimpleNamespace(shape=shape, element_size=lambda: 2)


QUERY, KEY = tensor(1, 32, 8192, 128), tensor(1, 8, 8192, 128)


def module(ran: list[str]) -> SimpleNamespace:
    class CachingAutotuner:
        def __init__(self, fn, triton_meta, configs, name: str = "") -> None:
            self.fn, self.configs, self.inductor_meta = fn, configs, {"kernel_name": name}

        def run(self, *args, stream):
            ran.append(self.inductor_meta["kernel_name"])
            if stream is None:
                raise RuntimeError("no stream")

        def coordinate_descent_tuning(self, launcher, *args):
            ran.append("descent")

    return SimpleNamespace(CachingAutotuner=CachingAutotuner)


@pytest.mark.parametrize(("name", "products", "factor"), [(FORWARD, 2, 1), (BACKWARD, 7, 2)])
def test_flex_attention_takes_its_products_over_half_of_the_scores(name: str, products: int, factor: int) -> None:
    found = inductor.fields_of(name, (QUERY, KEY, KEY, tensor(1, 32, 8192)))
    assert found is not None
    assert found["flops"] == products * 2 * 128 * 32 * 8192**2 / 2
    assert found["bytes"] == factor * 2 * 128 * 8192 * (32 + 8 + 8 + 32)
    assert (found["head_dim"], found["reach"]) == (128, 8192)


def test_queries_at_other_places_than_keys_see_all_of_them() -> None:
    found = inductor.fields_of(FORWARD, (tensor(1, 8, 64, 128), tensor(1, 8, 8192, 128), tensor(1, 8, 8192, 128)))
    assert found is not None
    assert found["flops"] == 2 * 2 * 128 * 8 * 64 * 8192
    assert found["reach"] == 2 * 8192


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("triton_per_fused_flex_attention_backward_0", (QUERY, KEY, KEY)),  # what is reduced before it
        ("triton_poi_fused_add_0", (QUERY, KEY, KEY)),
        (FORWARD, (QUERY, KEY)),
        (FORWARD, (tensor(8192, 128), KEY, KEY)),
        (FORWARD, (1, 2, 3)),
    ],
)
def test_other_kernels_are_priced_as_before(name: str, args: tuple[object, ...]) -> None:
    assert inductor.fields_of(name, args) is None


def test_a_launch_is_told_before_and_behind_and_variants_are_not_searched() -> None:
    ran: list[str] = []
    said: list[object] = []
    made = module(ran)
    inductor._wrap(made, SimpleNamespace(describe_kernel=said.append))
    flex = made.CachingAutotuner(None, {}, ["a tile", "another"], FORWARD)
    other = made.CachingAutotuner(None, {}, [], name="triton_poi_fused_add_0")
    flex.run(QUERY, KEY, KEY, stream=1)
    other.run(QUERY, stream=1)
    with pytest.raises(RuntimeError, match="no stream"):
        flex.run(QUERY, KEY, KEY, stream=None)
    assert ran == [FORWARD, "triton_poi_fused_add_0", FORWARD]
    assert [each is None for each in said] == [False, True, False, True]
    assert flex.configs == ["a tile"]
    assert flex.coordinate_descent_tuning("the launcher", 1, 2) == "the launcher"
    inductor._wrap(SimpleNamespace(), SimpleNamespace(describe_kernel=said.append))  # a release without that class


def test_other_kernels_are_told_by_what_their_source_moves() -> None:
    text = """
def triton_poi_fused_t_0(in_ptr0, out_ptr0, ynumel, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + (x1 + 64*y0), xmask)
    tl.store(out_ptr0 + (y0 + 32*x1), tmp0, xmask)
"""
    said: list[object] = []
    made = module([])
    inductor._wrap(made, SimpleNamespace(describe_kernel=said.append))
    held = SimpleNamespace(numel=lambda: 2048, element_size=lambda: 2)
    for name in ("triton_poi_fused_t_0", "triton_tem_fused_mm_0"):  # a product's loops read tiles again
        made.CachingAutotuner(SimpleNamespace(src=text), {}, [], name).run(held, held, 32, 64, stream=1)
    assert said == [{"op": "triton_poi_fused_t_0", "bytes": 8192, "access": "rearrange"}, None]


def test_of_several_kernels_for_an_operator_the_first_is_taken() -> None:
    functions: list[Callable[[list[str]], list[str]]] = []
    inductor._take_first(SimpleNamespace(add_preprocessing_fn=functions.append))
    (function,) = functions
    assert function(["cublas", "triton_mm_0", "triton_mm_1"]) == ["cublas"]
    assert function([]) == []
    inductor._take_first(SimpleNamespace())
