"""Times of a convolution, a transform, Triton kernels and what comes behind them, as lines of JSON; run emulated."""

import json
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
import triton
import triton.language as tl
from torch.utils.flop_counter import register_flop_formula


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):  # noqa: N803 - as Triton has it
    for i in range(0, 1024):
        at = (tl.program_id(0) * 1024 + i) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def product(a, b, c, size, BLOCK: tl.constexpr, DEPTH: tl.constexpr):  # noqa: N803, PLR0917
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, size, DEPTH):
        depth = k + tl.arange(0, DEPTH)
        left = tl.load(a + rows[:, None] * size + depth[None, :])
        total = tl.dot(left, tl.load(b + depth[:, None] * size + columns[None, :]), total)
    tl.store(c + rows[:, None] * size + columns[None, :], total.to(tl.bfloat16))


def took_ms(call: Callable[[], object]) -> float:
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(4):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 4


def main() -> None:
    found = {}
    query = torch.randn(4, 32, 4096, 128, device="cuda", dtype=torch.bfloat16)
    weights = [torch.nn.Parameter(torch.zeros(4096, 4096, device="cuda")) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    update = torch.optim.AdamW(weights, fused=True)
    images = torch.randn(32, 64, 56, 56, device="cuda", dtype=torch.bfloat16)
    convolution = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False, device="cuda", dtype=torch.bfloat16)
    for when in ("before", "behind"):
        found[f"attention {when}"] = took_ms(lambda: F.scaled_dot_product_attention(query, query, query))
        found[f"update {when}"] = took_ms(update.step)
        found["convolution"] = took_ms(lambda: convolution(images))
    # The values of a small one are the CPU's.
    small = torch.nn.Conv2d(3, 4, 3)
    few = torch.randn(2, 3, 8, 8)
    expected = small(few)
    found["is exact"] = bool(torch.allclose(small.cuda()(few.cuda()).cpu(), expected, atol=1e-5))
    signal = torch.zeros(4096, 4096, device="cuda")
    found["transform"] = took_ms(lambda: torch.fft.rfft(signal))

    x = torch.zeros(1 << 27, device="cuda")
    y = torch.empty_like(x)
    found["copy"] = took_ms(lambda: copy[(128,)](x, y, x.numel(), BLOCK=1024))
    a, b, c = (torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def multiply() -> None:
        product[(64, 64)](a, b, c, 8192, BLOCK=128, DEPTH=64)

    found["product"] = took_ms(multiply)
    register_flop_formula(product)(lambda *_, kwargs, **__: 2 * kwargs["size"] ** 3)
    found["product with its flops"] = took_ms(multiply)
    sys.stderr.write(f"FOUND {json.dumps(found)}\n")


main()
