"""Tune online under Ray Train, which starts the ranks itself, so that `lagom run` has no command to stand before.

    pip install 'ray[train]'
    python examples/clusters/ray_train.py --workers 2              # CPUs, gloo
    python examples/clusters/ray_train.py --workers 8 --gpus       # GPUs, NCCL: never run there

The two lines that tune are marked. On GPUs the plug-in must be named before NCCL starts, hence the environment.
"""

import argparse
from pathlib import Path

import ray
import torch
from ray import train as ray_train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from lagom_overlap import OnlineTuner, installed_library


def train(config: dict[str, object]) -> None:
    """What each of Ray's workers runs; torch's process group is already there."""
    torch.manual_seed(0)
    width, device = int(str(config["width"])), "cuda" if config["gpus"] else "cpu"
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tuner = OnlineTuner(model, optimizer)  # <- the first line
    for step in range(int(str(config["steps"]))):
        with tuner.step():  # <- the second line
            x = torch.randn(64, width, generator=torch.Generator().manual_seed(step)).to(device)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"{tuner.state}: {tuner.reason}")
        tuner.save(Path(str(config["save"])))
    ray_train.report({"loss": loss.item(), "state": str(tuner.state), "reason": tuner.reason})
    tuner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--save", type=Path, default=Path("lagom.json"), help="where rank 0 writes what was found")
    args = parser.parse_args()

    variables = ("NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN") if args.gpus else ()
    ray.init(runtime_env={"env_vars": {name: str(installed_library()) for name in variables}})
    trainer = TorchTrainer(
        train,
        train_loop_config={
            "width": args.width,
            "steps": args.steps,
            "gpus": args.gpus,
            "save": str(args.save.resolve()),
        },
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=args.gpus),
        torch_config=TorchConfig(backend="nccl" if args.gpus else "gloo"),
        run_config=RunConfig(name="lagom"),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
