"""What a tuned FSDP2 job on gloo gains, and by what: stock, asynchronous, engine untuned, tuned, in shuffled rounds.

    torchrun --nproc-per-node 2 examples/train_gpt_fsdp2.py --width 256 --layers 3 --save lagom.json
    torchrun --nproc-per-node 2 benchmarks/online_fsdp2.py lagom.json --width 256 --layers 3

Arms: `stock` (FSDP2 as it is: nothing overlaps on a CPU), `native` (the adapter's asynchronous FSDP2, gloo's own calls:
the tuner's default), `whole` (the same through the engine, each message as one slice: the engine without tuning),
`tuned` (the saved settings). One job, one model; every round runs each arm once in shuffled order. Prints each arm's
median step and the paired ratios to `tuned`, with quartiles.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from lagom_overlap.collective import CommConfig, ConfigTable
from lagom_overlap.collective.sites import cycles_for, table_of
from lagom_overlap.engines.gloo_space import MIN_SLICE_BYTES
from lagom_overlap.export.saved import SavedSettings, read_saved
from lagom_overlap.online.adapters.fsdp2 import Fsdp2Adapter
from lagom_overlap.online.routes.gloo import GlooRoute
from lagom_overlap.record import describe_machine, package_versions
from lagom_overlap.tuners.verdict import PairedRatio

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_gpt_fsdp2 import Gpt, batch_of, text

ARMS = ("stock", "native", "whole", "tuned")
WARM_UP_STEPS = 1


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", type=Path)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of an arm in a round")
    return parser.parse_args()


class Arms:
    """Puts the job under one arm after the other, between two steps of all ranks."""

    def __init__(self, model: torch.nn.Module, saved: SavedSettings) -> None:
        self._model = model
        self._route = GlooRoute(dist.PrefixStore("online-benchmark", _get_default_store()))
        self._saved = saved
        self._detach: Callable[[], None] | None = None
        self._epoch = 0

    def choose(self, arm: str) -> None:
        """From the next step on."""
        dist.barrier()
        if arm == "stock" and self._detach is not None:
            self._detach()
            self._detach = None
        if arm != "stock" and self._detach is None:
            self._detach = Fsdp2Adapter().attach(self._model, self._route)
        self._epoch += 1
        self._route.prepare(self._table(arm), self._epoch)
        dist.barrier()
        self._route.commit(self._epoch)

    def begin_step(self) -> None:
        """The next step begins."""
        self._route.begin_step(is_measured=False)

    def _table(self, arm: str) -> ConfigTable:
        if arm in ("stock", "native"):
            return ConfigTable({})
        names = self._route.communicators()
        table = table_of(self._saved.settings, names, cycles=cycles_for(self._saved.cycles, names))
        if arm == "tuned":
            return table
        whole = {key: CommConfig(num_channels=1, chunk_bytes=max(MIN_SLICE_BYTES, key.num_bytes)) for key, _ in table}
        return replace(table, rows=whole)


def main() -> None:
    """Every rank runs this."""
    args = arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    saved = read_saved(args.settings, world_size=dist.get_world_size())
    model = Gpt(args.width, args.layers, max(1, args.width // 64), args.length)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    arms, data, count = Arms(model, saved), text(), 0
    times: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(args.rounds):
        order = list(ARMS)
        Random(number).shuffle(order)
        for arm in order:
            arms.choose(arm)
            steps = []
            for _ in range(WARM_UP_STEPS + args.steps):
                began = time.perf_counter()
                arms.begin_step()
                tokens = batch_of(data, count, rank, args.batch, args.length)
                loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                steps.append(time.perf_counter() - began)
                count += 1
            slowest = torch.tensor([statistics.median(steps[WARM_UP_STEPS:])])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[arm].append(float(slowest))
    if rank == 0:
        print(describe_machine(), package_versions())
        print(f"{dist.get_world_size()} ranks, {args.rounds} rounds, {args.steps} measured steps an arm and round")
        for arm in ARMS:
            ratio = PairedRatio.of(times[arm], times["tuned"])
            print(
                f"{arm:7s} median {statistics.median(times[arm]) * 1e3:8.1f} ms   over tuned {ratio.median_ratio:.3f} "
                f"[{ratio.q25:.3f}, {ratio.q75:.3f}]  {ratio.num_wins}/{ratio.num_pairs}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
