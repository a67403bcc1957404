"""Ranks of a benchmark: its own script again, once per rank, on an emulated link if asked, each pinned to a core."""

import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import distributed as dist

from lagom_overlap.backends.gloo.link import EmulatedLink
from lagom_overlap.capturing.fx import FxCapture
from lagom_overlap.engines.fx.apply import name_operators
from lagom_overlap.engines.fx.program_session import PlannedSession
from lagom_overlap.engines.gloo_worker import die_with_parent, pin_to_core
from lagom_overlap.jobfile.spec import link_bytes_per_s

PORT_ENV, PARENT_ENV = "LAGOM_BENCHMARK_PORT", "LAGOM_BENCHMARK_PARENT"


def spawn(num_ranks: int, link: str) -> int:
    """Runs this script with `--rank N` for every rank; the worst exit status."""
    rate = link_bytes_per_s(link)
    emulated = EmulatedLink(rate, num_ranks) if rate is not None else None
    environment = {**os.environ, PORT_ENV: str(random.randint(20000, 60000)), PARENT_ENV: str(os.getpid())}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    prefix = emulated.prefix if emulated else []
    try:
        processes = [
            subprocess.Popen([*prefix, sys.executable, *sys.argv, "--rank", str(rank)], env=environment)
            for rank in range(num_ranks)
        ]
        return max(process.wait() for process in processes)
    finally:
        if emulated:
            emulated.close()


def join(rank: int, num_ranks: int) -> None:
    """Makes this process a rank."""
    die_with_parent(int(os.environ[PARENT_ENV]))
    pin_to_core(rank, num_ranks)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    store = dist.TCPStore("127.0.0.1", int(os.environ[PORT_ENV]), is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)


def leave() -> None:
    """Ends this rank; compiler threads and process groups would wait for each other on the way out."""
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


class Everyone:
    """Agreement of all ranks, on the default group: between runs it carries nothing else."""

    def barrier(self) -> None:
        """Returns when every rank has come."""
        dist.barrier()

    def maxima(self, values: list[float]) -> list[float]:
        """Each value's maximum over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor]

    def gather(self, value: int) -> tuple[int, ...]:
        """Every rank's number, by rank."""
        numbers = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        numbers[dist.get_rank()] = value
        dist.all_reduce(numbers)
        return tuple(int(number) for number in numbers)


def times_alone(captured: FxCapture, inputs: Sequence[Any], repeats: int) -> Mapping[str, float]:
    """Median seconds of every operator running alone, the slowest rank's; the first run does not count."""
    name_operators(captured.graph_module.graph, captured.iteration)
    session = PlannedSession(Everyone())
    runs = [session.alone_s(captured.graph_module, inputs) for _ in range(repeats + 1)][1:]
    names = list(runs[0])
    return dict(zip(names, Everyone().maxima([median(run[name] for run in runs) for name in names]), strict=True))
