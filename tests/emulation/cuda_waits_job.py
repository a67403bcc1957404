"""Initializes by rejection in memory that is not zero; then does what it is told."""

import sys

import torch


def main() -> None:
    large = torch.full((1 << 26,), 255, dtype=torch.uint8, device="cuda")
    small = [torch.full((512,), 255, dtype=torch.uint8, device="cuda") for _ in range(1000)]
    del large, small  # the allocator hands them out again
    weight = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for low, high in ((-2.0, 2.0), (3.0, 4.0)):  # by two ways in PyTorch 2.15
        torch.nn.init.trunc_normal_(weight, a=low, b=high)
    sys.stderr.write("initialized\n")
    large = torch.randn(2048, 2048, device="cuda")
    match sys.argv[1]:
        case "loop":
            while not (large > 0).all():
                large = torch.randn(2048, 2048, device="cuda")
        case "svd":
            torch.linalg.svd(large)
        case "sparse":
            torch.eye(64, device="cuda").to_sparse() @ large[:64]


main()
