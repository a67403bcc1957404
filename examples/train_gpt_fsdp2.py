"""Train a small GPT with FSDP2, on CPU or GPUs, with and without online tuning.

    torchrun --nproc-per-node 2 examples/train_gpt_fsdp2.py                 # tunes itself while it trains
    torchrun --nproc-per-node 2 examples/train_gpt_fsdp2.py --no-tune       # the same training, untouched
    torchrun --nproc-per-node 2 examples/train_gpt_fsdp2.py --config lagom.json   # starts with what was saved
    torchrun --nproc-per-node 2 examples/train_gpt_fsdp2.py --device cuda         # on GPUs, with NCCL

The two lines that tune are marked. Bytes of Python's own standard library are the text, so nothing is downloaded. The
losses with and without tuning are equal bit by bit: all-gathers move bytes, and each gradient is summed in one order.
"""

import argparse
import inspect
import json
import logging
import os
import statistics
import time
from importlib import import_module
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from lagom_overlap import OnlineTuner

MODULES = ("argparse", "ast", "datetime", "decimal", "inspect", "logging", "pathlib", "tarfile", "statistics", "typing")


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, width: int, num_layers: int, num_heads: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def text() -> torch.Tensor:
    sources = "".join(inspect.getsource(import_module(name)) for name in MODULES)
    return torch.frombuffer(bytearray(sources.encode()), dtype=torch.uint8).long()


def batch_of(data: torch.Tensor, step: int, rank: int, size: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(data) - length - 1, (size,), generator=generator)
    return torch.stack([data[start : start + length + 1] for start in starts])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--no-tune", action="store_true", help="train untouched")
    parser.add_argument("--tuner", default="lagom")
    parser.add_argument("--pairs", type=int, default=25, help="most rounds of the verdict: default against tuned")
    parser.add_argument("--config", type=Path, help="start with settings saved before")
    parser.add_argument("--save", type=Path, help="where to write what was found")
    parser.add_argument("--journal", type=Path, help="where to keep the measurements, to go on after a restart")
    parser.add_argument("--record", type=Path, help="where rank 0 writes losses and step times as JSON")
    args = parser.parse_args()
    if args.config is not None and not args.config.is_file():
        parser.error(f"argument --config: {str(args.config)!r} is no file; give one that --save wrote")
    return args


def main() -> None:
    args = arguments()
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Gpt(args.width, args.layers, args.width // 64, args.length).to(args.device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    tuner = OnlineTuner(  # <- the first line
        model,
        optimizer,
        enabled=not args.no_tune,
        config=args.config,
        journal=args.journal,
        tuner=args.tuner,
        num_pairs=args.pairs,
    )
    data, losses, times, states = text(), [], [], []
    for step in range(args.steps):
        began = time.perf_counter()
        with tuner.step():  # <- the second line
            tokens = batch_of(data, step, rank, args.batch, args.length).to(args.device)
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.perf_counter() - began)
        losses.append(loss.item())
        states.append(str(tuner.state))
        if rank == 0 and step % 20 == 0:
            state = "" if args.no_tune else f"  {tuner.state}"
            print(f"step {step:4d}  loss {losses[-1]:.4f}  {statistics.median(times[-20:]):.3f} s{state}", flush=True)
    if rank == 0 and not args.no_tune:
        print(f"{tuner.state}: {tuner.reason}")
    if args.save is not None:
        tuner.save(args.save)
    if rank == 0 and args.record is not None:
        args.record.write_text(
            json.dumps({"losses": losses, "times_s": times, "states": states, "reason": tuner.reason})
        )
    tuner.close()
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)


if __name__ == "__main__":
    main()
