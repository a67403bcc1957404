"""FSDP2 in bf16 on ranks that may share a GPU: whole steps' times, losses to compare bit for bit, traces.

    torchrun --nproc-per-node 2 train.py --steps 100 --record stock.json --trace traces

The loss is summed over ranks on the compute stream every tenth step, as jobs that log it do. A step's time is that
between two events on the compute stream.
"""

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from statistics import median

import torch
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from train_gpt_fsdp2 import Gpt

LOG_EVERY = 10


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--record", type=Path, help="where rank 0 writes losses and step times")
    parser.add_argument(
        "--deterministic", action="store_true", help="two runs have equal bits (set CUBLAS_WORKSPACE_CONFIG)"
    )
    parser.add_argument("--trace", type=Path, help="folder for a trace of three steps, one file per rank")
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = arguments()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.manual_seed(0)
    if args.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("cuda"):
        model = Gpt(args.width, args.layers, args.width // 128, args.length)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    draw = torch.Generator(device="cuda").manual_seed(rank)
    marks, losses = [], []
    profiler = traced(args, rank) if args.trace else None
    for step in range(args.steps):
        tokens = torch.randint(256, (args.batch, args.length + 1), device="cuda", generator=draw)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            losses.append(shown)
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        if profiler is not None:
            profiler.step()
        if step in (0, 2) or step % 100 == 99:
            torch.cuda.synchronize()
        if rank == 0 and step == 0:
            print("the first step is done", flush=True)
        if rank == 0 and (step == 2 or step % 100 == 99):
            print(
                f"step {step:4d}  {median(spans_s(marks[-60:])) * 1e3:.2f} ms  loss {losses[-1].item():.6f}", flush=True
            )
    torch.cuda.synchronize()
    if profiler is not None:
        profiler.__exit__(None, None, None)
    if rank == 0 and args.record is not None:
        found = {"losses": [loss.item() for loss in losses], "times_s": spans_s(marks), "bits": bits_of(model)}
        args.record.write_text(json.dumps(found))
    dist.destroy_process_group()


def spans_s(marks: list[torch.cuda.Event]) -> list[float]:
    """Seconds from each event to the next."""
    return [a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(marks)]  # ms


def bits_of(model: torch.nn.Module) -> list[int]:
    """A sum over the bits of each parameter of this rank."""
    return [int(p.to_local().view(torch.int32).sum(dtype=torch.int64)) for p in model.parameters()]


def traced(args: argparse.Namespace, rank: int) -> torch.profiler.profile:
    """A profiler of three steps after ten."""
    args.trace.mkdir(parents=True, exist_ok=True)
    path = args.trace / f"rank{rank}.json.gz"
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
        schedule=torch.profiler.schedule(wait=10, warmup=2, active=3, repeat=1),
        record_shapes=True,
        experimental_config=torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True),
        on_trace_ready=lambda made: made.export_chrome_trace(str(path)),
    )
    profiler.__enter__()
    return profiler


if __name__ == "__main__":
    main()
