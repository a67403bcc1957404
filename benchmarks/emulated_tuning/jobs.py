"""The jobs that are tuned: what a rank trains, in small, and how often it is tuned.

    torchrun --nproc-per-node N jobs.py NAME --seeds 10 --out FOLDER     # tunes it ten times, one tuner after another
    torchrun --nproc-per-node N jobs.py NAME --steps 4                   # the untouched job alone

Run by `run.py` on emulated GPUs, with our plug-in in NCCL's environment. Every tuning is a new `OnlineTuner` with a
seed of its own, on the same model; on the emulated clock each also meets other draws of the noise.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lagom_overlap import OnlineTuner

NUM_SETTLED_STEPS = 3
MOST_STEPS = 1200


class Mlp(nn.Module):
    """Width to four widths and back, with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both products."""
        return x + self.down(nn.functional.gelu(self.up(x)))


class Exchange(torch.autograd.Function):
    """Equal all-to-all, forward and backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        """To the others."""
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        """And back."""
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous())
        return out


class Expert(nn.Module):
    """Tokens go to the other ranks' experts and come back; routing is fixed, so that sizes are equal."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp, self.shared = Mlp(width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The shared expert has no dependence on the exchange, but runs before it."""
        return self.shared(x) + Exchange.apply(self.mlp(Exchange.apply(x)))


class Flight:
    """One collective of half a batch under way, forward or backward; what is launched runs beside the other half."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._work: dist.Work | None = None

    def launch(self, x: torch.Tensor) -> torch.Tensor:
        """Begins it; the result is there after `land`."""
        if self._kind == "all_reduce":
            out = x.clone()
            self._work = dist.all_reduce(out, async_op=True)
        else:
            out = torch.empty_like(x)
            self._work = dist.all_to_all_single(out, x.contiguous(), async_op=True)
        return out

    def land(self) -> None:
        """The stream waits for it."""
        assert self._work is not None, "landed before it was launched"
        self._work.wait()


class Launch(torch.autograd.Function):
    """Begins a collective; backward, waits for the one that `Land` began. Autograd runs what was called last first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, flight: Flight) -> torch.Tensor:
        """See the class."""
        ctx.flight = flight
        return flight.launch(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """See the class."""
        ctx.flight.land()
        return grad, None


class Land(torch.autograd.Function):
    """Waits for a collective; backward, begins the one of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, flight: Flight) -> torch.Tensor:
        """See the class."""
        ctx.flight = flight
        flight.land()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """See the class."""
        return ctx.flight.launch(grad), None


class Slices(nn.Module):
    """Tensor parallelism in two slices of the batch, after Domino: one's all-reduce runs beside the other's products.

    A slice's sum over ranks forward, and its input's gradient's backward; no residual, so that both are one `Flight`.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        cut = 4 * width // dist.get_world_size()
        with torch.device("cuda"):
            pairs = [(nn.Linear(width, cut, bias=False), nn.Linear(cut, width, bias=False)) for _ in range(depth)]
        self.layers = nn.ModuleList(nn.Sequential(up, nn.GELU(), down) for up, down in pairs).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers, slice by slice."""
        parts: list[torch.Tensor] = list(x.chunk(2))
        flights: list[Flight | None] = [None, None]
        for layer in self.layers:
            for at in range(2):
                if (under_way := flights[at]) is not None:
                    parts[at] = Land.apply(parts[at], under_way)
                flights[at] = Flight("all_reduce")
                parts[at] = Launch.apply(layer(parts[at]), flights[at])
        return torch.cat([Land.apply(part, flight) for part, flight in zip(parts, flights, strict=True)])


class TwoBatches(nn.Module):
    """A layer of experts over two halves of the batch: one's exchange runs beside the other's products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp, self.shared = Mlp(width), Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Dense part, tokens to the experts, experts, tokens back."""
        parts: list[torch.Tensor] = list(x.chunk(2))
        there = [Flight("all_to_all"), Flight("all_to_all")]
        back = [Flight("all_to_all"), Flight("all_to_all")]
        for at in range(2):
            parts[at] = Launch.apply(self.shared(parts[at]), there[at])
        for at in range(2):
            parts[at] = Launch.apply(self.mlp(Land.apply(parts[at], there[at])), back[at])
        return torch.cat([Land.apply(part, flight) for part, flight in zip(parts, back, strict=True)])


def stack(layer: type[nn.Module], width: int, depth: int) -> nn.Sequential:
    """Layers in bf16, made on the GPU: what is initialised there takes no memory of the host."""
    with torch.device("cuda"):
        return nn.Sequential(*(layer(width) for _ in range(depth))).bfloat16()


def sharded(model: nn.Sequential, **options: object) -> nn.Module:
    """FSDP2, a group per layer."""
    for layer in model:
        fully_shard(layer, **options)  # type: ignore[call-overload]
    return fully_shard(model, **options)  # type: ignore[call-overload,no-any-return]


def fsdp2(width: int, depth: int) -> nn.Module:
    """All-gathers ahead of each layer, reduce-scatters behind."""
    return sharded(stack(Mlp, width, depth))


def ddp(width: int, depth: int) -> nn.Module:
    """All-reduces of buckets beside the backward pass."""
    return nn.parallel.DistributedDataParallel(stack(Mlp, width, depth), bucket_cap_mb=32)


def tp(width: int, depth: int) -> nn.Module:
    """DTensor, columns then rows: an all-reduce that nothing overlaps after every layer."""
    model, mesh = stack(Mlp, width, depth), init_device_mesh("cuda", (dist.get_world_size(),))
    for layer in model:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def moe(width: int, depth: int) -> nn.Module:
    """FSDP2 over layers with all-to-all, which no tuner of NCCL is asked about."""
    return sharded(stack(Expert, width, depth))


def domino(width: int, depth: int) -> nn.Module:
    """Tensor parallelism whose all-reduces are hidden behind the other half of the batch."""
    return Slices(width, depth)


def dual_batch(width: int, depth: int) -> nn.Module:
    """FSDP2 over layers of experts whose all-to-all is hidden behind the other half of the batch."""
    return sharded(stack(TwoBatches, width, depth))


def hsdp(width: int, depth: int) -> nn.Module:
    """FSDP2 in pairs, all-reduces between them."""
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    return sharded(stack(Mlp, width, depth), mesh=mesh)


JOBS: dict[str, Callable[[int, int], nn.Module]] = {
    f.__name__: f for f in (fsdp2, ddp, tp, moe, hsdp, domino, dual_batch)
}


class Steps:
    """The job's training loop; counts its steps."""

    def __init__(self, model: nn.Module, width: int, tokens: int) -> None:
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=1e-3)
        self.x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        self.count = 0

    def run(self) -> None:
        """One step."""
        self.model(self.x).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1


def groups_of(tuner: OnlineTuner) -> list[dict[str, object]]:
    """What rank 0 searched: the calls of each overlap group, their sites, and what may be set for them."""
    leader = tuner._member and tuner._member._leader
    search = leader and leader._search
    if not search:
        return []
    found = [(name, group.sites, group.problem.spaces) for name, group in search.job.groups.items()]
    rows = [{"name": name, "sites": sites, "spaces": spaces} for name, sites, spaces in found]
    return cast("list[dict[str, object]]", msgspec.to_builtins(rows))


def tuned(steps: Steps, seed: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Tunes the job once; what became of it."""
    options = {"mode": arguments.mode} if arguments.tuner == "lagom" else {}
    journal = arguments.out / f"journal.{seed}.jsonl"
    tuner = OnlineTuner(
        steps.model,
        steps.optimizer,
        seed=seed,
        tuner=arguments.tuner,
        tuner_options=options,
        watch_steps=0,
        journal=journal,
    )
    first, words = steps.count, []
    while not tuner.is_settled and steps.count - first < MOST_STEPS:
        if not words or words[-1][0] != str(tuner.state):
            words.append((str(tuner.state), steps.count))
        with tuner.step():
            steps.run()
    settled = steps.count
    for _ in range(NUM_SETTLED_STEPS):
        with tuner.step():
            steps.run()
    saved = arguments.out / f"settings.{seed}.json"
    tuner.save(saved)
    found = {
        "seed": seed,
        "first_step": first,
        "settled_step": settled,
        "last_step": steps.count,
        "states": words,
        "state": str(tuner.state),
        "reason": tuner.reason,
        "saved": str(saved),
        "groups": groups_of(tuner),
        "num_measured": len(journal.read_text().splitlines()) - 1 if journal.is_file() else 0,
    }
    tuner.close()
    return found


def main() -> None:
    """Every rank runs this."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=JOBS)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="of the untouched job, before it is tuned")
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    parser.add_argument("--tuner", default="lagom")
    parser.add_argument("--mode", default="repaired")
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    steps = Steps(JOBS[arguments.name](arguments.width, arguments.depth), arguments.width, arguments.tokens)
    for _ in range(arguments.steps):
        steps.run()
    for seed in arguments.seeds:
        found = tuned(steps, seed, arguments)
        if dist.get_rank() == 0:
            with (arguments.out / "tunings.jsonl").open("a") as file:
                file.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
