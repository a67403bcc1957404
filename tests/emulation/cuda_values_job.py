"""Operators on an emulated GPU against the same on the CPU; run by test_cuda_torch.py."""

import torch
from torch.nn import functional

torch.manual_seed(0)
SMALL, INDICES, MANY = torch.randn(64, 8), torch.randint(0, 8, (1000,)), torch.randint(0, 100, (300_000,))
OPERATORS = (
    (SMALL, lambda x: torch.topk(torch.softmax(x, -1), 2)),
    (SMALL, lambda x: x.mul_(2).add_(1)),
    (SMALL, lambda x: torch._foreach_add([x, x], 1.0)),
    (SMALL, lambda x: x.t() @ x),
    (SMALL, lambda x: (x.bfloat16() * 3).float()),
    (SMALL, lambda x: [x.sum().item() > 0, bool((x.abs() < 100).all()), torch.equal(x, x.clone())]),
    (INDICES, lambda i: torch.sort(i, stable=True)),
    (INDICES, lambda i: torch.argsort(i, stable=True)),
    (INDICES, lambda i: [torch.bincount(i), torch.bincount(i, minlength=9).tolist()]),
    (INDICES, lambda i: [(i == 3).nonzero(), i[i > 4], torch.where(i > 3, i, -i)]),
    (INDICES, lambda i: torch.unique(i, return_counts=True)),
    (INDICES, lambda i: torch.zeros(8, dtype=torch.int64, device=i.device).scatter_add_(0, i, torch.ones_like(i))),
    (INDICES, lambda i: torch.repeat_interleave(torch.arange(1000, device=i.device), i)),
    (INDICES, lambda i: [functional.one_hot(i, 8).sum(0), torch.cumsum(i, 0), torch.histc(i.float(), 8, 0, 7)]),
    (MANY, lambda i: [i.sum(), i[i > 50]]),
    # What a CPU counts in another way: torchtitan counts tokens by expert so, where there are millions of them.
    (MANY.repeat(8), lambda i: torch.histc(i, 100, 0, 99) if i.is_cuda else torch.bincount(i, minlength=100)),
)


def same(found, expected):
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if not isinstance(expected, torch.Tensor):
        return found == expected
    return torch.allclose(found.cpu(), expected)


for number, (tensor, operator) in enumerate(OPERATORS):
    assert same(operator(tensor.cuda()), operator(tensor.clone())), number

# Kernels that count leave what was there before, which is no size of anything.
for _ in range(3):
    torch.full((1 << 17,), 2**31 - 1, dtype=torch.int32, device="cuda")
counts = INDICES.cuda()
held = torch.cuda.memory_allocated()  # cuBLAS's workspace among it, of which releases of PyTorch have their own idea
torch.cuda.reset_peak_memory_stats()
for operator in (torch.nonzero, torch.bincount, torch.unique, lambda i: i[i > 3], torch.repeat_interleave):
    operator(counts)
assert torch.cuda.max_memory_allocated() - held < 8 << 20, torch.cuda.max_memory_allocated() - held

torch.manual_seed(3)
first = torch.rand(5, device="cuda").tolist()
torch.manual_seed(3)
assert torch.rand(5, device="cuda").tolist() == first != torch.rand(5, device="cuda").tolist()

parameter = torch.nn.Parameter(torch.randn(10, device="cuda"))
before = parameter.tolist()
for options in ({"foreach": False}, {"foreach": True, "capturable": True}, {"fused": True}):
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.5, device="cuda"), weight_decay=0.0, **options)
    parameter.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [value - 0.5 for value in before]  # Adam's first step is the rate, against the gradient's sign
    assert torch.allclose(parameter.cpu(), torch.tensor(before), atol=1e-5), options
assert "device='cuda:0'" in repr(parameter)

layer = torch.nn.Linear(48, 48)
expected = layer(SMALL.view(-1)[:480].view(10, 48))
with (
    torch.inference_mode()
):  # torch takes no operator apart there: a product within one is still no kernel that computes
    found = layer.cuda()(SMALL.view(-1)[:480].view(10, 48).cuda())
assert torch.allclose(found.cpu(), expected.detach(), atol=1e-6)

logits = torch.randn(4096, 1024, device="cuda") @ torch.randn(1024, 8, device="cuda")
float(logits.sum())  # a loss may be printed
for reading in (lambda chosen: chosen.flatten().bincount(), lambda chosen: chosen[0, 0].item(), torch.unique):
    refused = ""
    try:
        reading(logits.topk(2).indices)
    except RuntimeError as error:
        refused = str(error)
    assert "aten::mm" in refused, refused

uncomputed = logits.argmax(0)  # of eight whole numbers, which rest on the product
place = uncomputed.data_ptr()
del uncomputed
told = torch.tensor(range(8), device="cuda")  # takes the freed memory; torch copies there without an operator
assert told.data_ptr() == place
assert told.tolist() == list(range(8))
