"""Train a small mixture of experts with dual batches on CPU: the all-to-all of one during the computation of the other.

    torchrun --nproc-per-node 2 examples/train_moe_dual_batch.py               # tunes itself while it trains
    torchrun --nproc-per-node 2 examples/train_moe_dual_batch.py --no-tune     # the same training, untouched

Each rank holds one expert of every layer. Tokens are sent to the experts and back in equal parts (the router fills each
expert to its capacity), so all-to-alls move bytes only, and `deterministic` keeps the tuner from any all-reduce whose
order of summation it would change: the losses with and without tuning are equal bit by bit. The step is cut into two
half batches whose layers take turns, as DeepSeek's dual-batch schedule does: while the tokens of one half travel, the
other half computes. The model's own calls are plain `torch.distributed` ones, so the adapter "calls" is named; the two
lines that tune are marked.
"""

import argparse
import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional

from lagom_overlap import OnlineTuner


class _Sent(torch.autograd.Function):
    """Tokens on their way; `arrive` waits for them. Backward sends the gradients the same way back."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, flight: "Flight") -> torch.Tensor:
        ctx.flight = flight
        arrived = torch.empty_like(tokens)
        flight.work = dist.all_to_all_single(arrived, tokens.contiguous(), async_op=True)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        flight = ctx.flight
        flight.back.wait()
        gradient, flight.back, flight.gradient = flight.gradient, None, None
        return gradient, None


class _Arrived(torch.autograd.Function):
    """The other end: forward waits for the tokens, backward sends their gradients off."""

    @staticmethod
    def forward(ctx: Any, arrived: torch.Tensor, flight: "Flight") -> torch.Tensor:
        ctx.flight = flight
        flight.work.wait()
        flight.work = None  # it holds `arrived`, whose graph holds the flight: a cycle that nothing would free
        return arrived.view_as(arrived)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        flight = ctx.flight
        flight.gradient = torch.empty_like(gradient)
        flight.back = dist.all_to_all_single(flight.gradient, gradient.contiguous(), async_op=True)
        return gradient, None


class Flight:
    """One all-to-all forward, and its gradients' one backward."""

    work: Any
    back: Any
    gradient: torch.Tensor | None

    def send(self, tokens: torch.Tensor) -> torch.Tensor:
        return _Sent.apply(tokens, self)

    def arrive(self, arrived: torch.Tensor) -> torch.Tensor:
        return _Arrived.apply(arrived, self)


class MoeLayer(nn.Module):
    """Dense part on every rank; one expert per rank, filled in equal parts by place in the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.dense = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.router = nn.Linear(width, 1)
        self.expert = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Half:
    """One half batch on its way through the layers, in stages that overlap with the other half."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def dispatch(self, layer: MoeLayer) -> None:
        self.x = self.x + layer.dense(layer.norm(self.x))
        self.gate = torch.sigmoid(layer.router(self.x))
        order = torch.argsort(self.gate.detach().flatten())  # the least wanted half to rank 0, and so on
        self.place = torch.argsort(order)
        self.flight = Flight()
        self.travelling = self.flight.send(self.x[order])

    def expert(self, layer: MoeLayer) -> None:
        out = layer.expert(self.flight.arrive(self.travelling))
        self.flight = Flight()
        self.travelling = self.flight.send(out)

    def combine(self) -> None:
        self.x = self.x + self.gate * self.flight.arrive(self.travelling)[self.place]


def forward(layers: nn.ModuleList, first: Half, second: Half) -> None:
    """Both halves, each stage of one while the tokens of the other travel."""
    for layer in layers:
        first.dispatch(layer)
        second.dispatch(layer)
        first.expert(layer)
        second.expert(layer)
        first.combine()
        second.combine()


def average_shared(layers: nn.ModuleList) -> None:
    """Gradients of what every rank holds, averaged; each expert keeps its own, which all ranks' tokens made."""
    shared = [p for layer in layers for part in (layer.norm, layer.dense, layer.router) for p in part.parameters()]
    flat = torch.cat([parameter.grad.flatten() for parameter in shared]) / dist.get_world_size()
    dist.all_reduce(flat)
    for parameter, mean in zip(shared, flat.split([parameter.numel() for parameter in shared]), strict=True):
        parameter.grad.copy_(mean.view_as(parameter))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a half batch on one rank")
    parser.add_argument("--no-tune", action="store_true", help="train untouched")
    parser.add_argument("--max-steps", type=int, default=1000, help="budget of the tuner in steps")
    parser.add_argument("--record", type=Path, help="where rank 0 writes losses and step times as JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = nn.ModuleList(MoeLayer(args.width) for _ in range(args.layers))
    target = torch.randn(args.width, args.width) / args.width**0.5
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)

    tuner = OnlineTuner(  # <- the first line
        layers,
        optimizer,
        adapters=("calls",),
        deterministic=True,
        enabled=not args.no_tune,
        max_steps=args.max_steps,
    )
    losses, times, states = [], [], []
    for step in range(args.steps):
        began = time.perf_counter()
        with tuner.step():  # <- the second line
            halves = [Half(torch.randn(args.tokens, args.width, generator=generator)) for _ in range(2)]
            wanted = [functional.silu(half.x @ target) for half in halves]
            forward(layers, *halves)
            loss = sum(functional.mse_loss(half.x, want) for half, want in zip(halves, wanted, strict=True))
            loss.backward()
            average_shared(layers)
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.perf_counter() - began)
        losses.append(loss.item())
        states.append(str(tuner.state))
        if rank == 0 and step % 20 == 0:
            state = "" if args.no_tune else f"  {tuner.state}"
            print(f"step {step:4d}  loss {losses[-1]:.4f}  {statistics.median(times[-20:]):.3f} s{state}", flush=True)
    if rank == 0:
        if not args.no_tune:
            print(f"{tuner.state}: {tuner.reason}")
        if args.record is not None:
            args.record.write_text(
                json.dumps({"losses": losses, "times_s": times, "states": states, "reason": tuner.reason})
            )
    tuner.close()
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)


if __name__ == "__main__":
    main()
