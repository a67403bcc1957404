"""Thousands of steps online, with drift and faults: what grows, and what a settled step costs.

    python benchmarks/long_run.py drift --steps 20000 --out samples.jsonl
    python benchmarks/long_run.py overhead --steps 5000

Two gloo ranks of this machine exchange `NUM_CALLS` messages of 1 MiB a step during small products; each rank checks
every message that arrives, byte by byte. `drift`: the computation becomes longer and shorter again, and `FAULTS` happen
on the way. Memory, descriptors, threads and keys of the store are sampled every `SAMPLED` steps. `overhead`: the tuner
settles on the untouched job at once; then blocks of steps under the tuner, its adapter and its watcher, and bare blocks
of the same calls without any of them, run in pairs in a shuffled order.
"""

import argparse
import gc
import json
import logging
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import nn

from lagom_overlap import OnlineTuner

NUM_RANKS: Final = 2
NUM_CALLS: Final = 3
NUMBERS: Final = 1 << 18
"""Four bytes each: the smallest message that is tuned."""
SAMPLED: Final = 250
BLOCK: Final = 25
WIDTH: Final = 192

NATIVE: Final = dist.all_to_all_single
"""Kept before an adapter is attached: it replaces the name in the module."""

FAULTS: Final[tuple[tuple[float, str], ...]] = (
    (0.10, "rank 1 is stopped for 2 s, and goes on"),
    (0.22, "steps take longer, for good"),
    (0.36, "a neighbour slows rank 0 for 100 steps"),
    (0.42, "steps are as short as before"),
    (0.50, "the journal's disk is full from here on"),
    (0.55, "steps take longer, for good"),
    (0.65, "rank 1 cannot be measured for 200 steps: another profiler runs"),
    (0.72, "every answer of rank 1's store takes 20 ms for 200 steps"),
    (0.80, "steps take longer, for good"),
    (0.90, "rank 1 loses the store"),
    (0.95, "stderr of rank 0 is closed"),
)


class LostStore:
    """A connection that is gone."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


class SlowStore:
    """A store that answers late."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        def call(*words: Any) -> Any:
            time.sleep(0.02)
            return getattr(self._store, name)(*words)

        return call


class Job:
    """One rank's training, without a model worth the name."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)) / WIDTH**0.5
        self.x = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(rank))
        half = torch.arange(NUMBERS // NUM_RANKS, dtype=torch.float32)
        self.sent = [
            torch.cat([half * (1 + call) + 10.0 * rank + to for to in range(NUM_RANKS)]) for call in range(NUM_CALLS)
        ]
        self.expected = [
            torch.cat([half * (1 + call) + 10.0 * origin + rank for origin in range(NUM_RANKS)])
            for call in range(NUM_CALLS)
        ]
        self.num_products = 4
        self.num_wrong = 0

    def step(self, exchange: Callable[..., Any]) -> None:
        """Messages under way during the products; each is checked."""
        for call in range(NUM_CALLS):
            arrived = torch.empty(NUMBERS)
            work = exchange(arrived, self.sent[call], async_op=True)
            for _ in range(self.num_products):
                self.x = torch.tanh(self.x @ self.weight)
            work.wait()
            self.num_wrong += not torch.equal(arrived, self.expected[call])


def sample(step: int, store: Any) -> dict[str, Any]:
    """What this process holds."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "step": step,
        "rss_mib": int(status["VmRSS"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - nothing of ours opens more than it counts
        "objects": len(gc.get_objects()),
        "keys": store.num_keys(),
    }


def happen(what: str, job: Job, tuner: OnlineTuner, step: int, ends: dict[int, Callable[[], None]]) -> None:
    """A fault or a drift, on the rank that it is of; `ends` says what undoes it, and when."""
    member: Any = tuner._member
    if "longer" in what:
        job.num_products *= 2
    elif "as short" in what:
        job.num_products //= 2
    elif "neighbour" in what and job.rank == 0:
        usual = job.num_products
        job.num_products = 3 * usual
        ends[step + 100] = lambda: setattr(job, "num_products", usual)
    elif "stopped" in what and job.rank == 1:
        print(json.dumps({"stop": True}), flush=True)
    elif "disk" in what:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    elif "profiler" in what and job.rank == 1:
        usual_why = member._why_not
        member._why_not = lambda: "another profiler runs"
        ends[step + 200] = lambda: setattr(member, "_why_not", usual_why)
    elif "20 ms" in what and job.rank == 1:
        store = member._exchange._store
        member._exchange._store = SlowStore(store)
        ends[step + 200] = lambda: setattr(member._exchange, "_store", store)
    elif "loses" in what and job.rank == 1:
        member._exchange._store = LostStore()
    elif "stderr" in what and job.rank == 0:
        os.close(2)


def online(steps: int, journal: str) -> dict[str, Any]:
    """The run with drift and faults."""
    rank = dist.get_rank()
    job = Job(rank)
    store = dist.distributed_c10d._get_default_store()
    tuner = OnlineTuner(
        nn.Linear(1, 1), adapters=["calls"], timeout_s=30.0, journal=journal, drift_ratio=1.3, max_rearms=1000
    )
    due = {round(share * steps): what for share, what in FAULTS}
    ends: dict[int, Callable[[], None]] = {}
    states: list[tuple[int, str]] = []
    own_s: list[float] = []
    latest: list[float] = []
    bin_began = time.perf_counter()
    for step in range(steps):
        if step in due:
            happen(due[step], job, tuner, step, ends)
        if step in ends:
            ends.pop(step)()
        began = time.perf_counter()
        with tuner.step():
            entered = time.perf_counter()
            job.step(dist.all_to_all_single)
            left = time.perf_counter()
        own = entered - began + time.perf_counter() - left
        latest.append(own)
        if str(tuner.state) in ("watch", "done", "off"):
            own_s.append(own)
        if not states or states[-1][1] != str(tuner.state):
            states.append((step, str(tuner.state)))
        if step % SAMPLED == SAMPLED - 1:
            ours = {"own_median_us": 1e6 * median(latest), "own_mean_us": 1e6 * fmean(latest)}
            said = {"rank": rank, **sample(step, store), "state": str(tuner.state), **ours}
            print(json.dumps({**said, "step_ms": 1e3 * (time.perf_counter() - bin_began) / SAMPLED}), flush=True)
            latest.clear()
            bin_began = time.perf_counter()
    return {
        "states": states,
        "reason": tuner.reason,
        "settings": len(tuner.settings),
        "wrong": job.num_wrong,
        "own_median_us": 1e6 * median(own_s),
        "own_mean_us": 1e6 * fmean(own_s),
        "settled": len(own_s),
    }


def overhead(steps: int) -> dict[str, Any]:
    """Blocks of steps in pairs, under the tuner and bare."""
    rank = dist.get_rank()
    job = Job(rank)
    tuner = OnlineTuner(nn.Linear(1, 1), adapters=["calls"], timeout_s=30.0, max_steps=0)
    while str(tuner.state) != "watch":
        with tuner.step():
            job.step(dist.all_to_all_single)
    assert not tuner.settings
    draw = random.Random(1)
    pairs: list[tuple[float, float]] = []
    processor: list[tuple[float, float]] = []
    own_s: list[float] = []
    own_processor_s: list[float] = []
    """Of all threads: the one that speaks to the store, too."""
    for _ in range(steps // (2 * BLOCK)):
        took, used = {}, {}
        for arm in draw.sample(("bare", "tuner"), 2):
            dist.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                if arm == "bare":
                    with nullcontext():
                        job.step(NATIVE)
                else:
                    start = time.perf_counter(), time.process_time()
                    with tuner.step():
                        entered = time.perf_counter(), time.process_time()
                        job.step(dist.all_to_all_single)
                        left = time.perf_counter(), time.process_time()
                    own_s.append(entered[0] - start[0] + time.perf_counter() - left[0])
                    own_processor_s.append(entered[1] - start[1] + time.process_time() - left[1])
            took[arm] = (time.perf_counter() - began) / BLOCK
            used[arm] = (time.process_time() - cpu_began) / BLOCK
        pairs.append((took["bare"], took["tuner"]))
        processor.append((used["bare"], used["tuner"]))
    ratios = [tuned / bare for bare, tuned in pairs]
    low, _, high = quantiles(ratios, n=4)
    # The sign test's interval of the median of the differences: no assumption on the noise.
    differences = sorted(tuned - bare for bare, tuned in pairs)
    n, reach = len(differences), round(0.98 * len(differences) ** 0.5)
    return {
        "pairs": n,
        "bare_ms": 1e3 * median(bare for bare, _ in pairs),
        "ratio": median(ratios),
        "ratio_quartiles": [low, high],
        "difference_us": 1e6 * median(differences),
        "difference_95_us": [1e6 * differences[max(0, n // 2 - reach)], 1e6 * differences[min(n - 1, n // 2 + reach)]],
        "processor_us": 1e6 * median(bare for bare, _ in processor),
        "processor_ratio": median(tuned / bare for bare, tuned in processor),
        "processor_difference_us": 1e6 * median(tuned - bare for bare, tuned in processor),
        "own_median_us": 1e6 * median(own_s),
        "own_mean_us": 1e6 * fmean(own_s),
        "own_processor_median_us": 1e6 * median(own_processor_s),
        "own_processor_mean_us": 1e6 * fmean(own_processor_s),
        "wrong": job.num_wrong,
    }


def rank_main(kind: str, steps: int, journal: str) -> None:
    """One rank."""
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    found = online(steps, journal) if kind == "drift" else overhead(steps)
    print(json.dumps({"rank": dist.get_rank(), "result": found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)


def main() -> None:
    """Starts the ranks, stops and continues one when it asks for it, prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("drift", "overhead"))
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--journal", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(chosen.kind, chosen.steps, chosen.journal)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, chosen.kind, "--steps", str(chosen.steps), "--journal"]
        ranks = [
            subprocess.Popen(
                [*command, str(Path(folder) / f"journal{rank}.jsonl")],
                env=os.environ
                | {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(NUM_RANKS)
        ]
        lines: list[dict[str, Any]] = []
        for process in (ranks[1], ranks[0]):  # rank 0 writes too little to fill its pipe
            assert process.stdout is not None
            for line in process.stdout:
                said = json.loads(line)
                if "stop" in said:
                    process.send_signal(signal.SIGSTOP)
                    time.sleep(2)
                    process.send_signal(signal.SIGCONT)
                    continue
                lines.append(said)
                if "result" in said or chosen.out is None:
                    print(json.dumps(said), flush=True)
        codes = [process.wait() for process in ranks]
    if chosen.out is not None:
        chosen.out.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    print(f"exit codes {codes}")
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
