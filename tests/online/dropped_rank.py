"""One rank of a job that makes a model and a tuner of it, trains, and drops both, twice.

It prints what is left of each, the threads of ours and how many threads there are more than before.
"""

import gc
import sys
import threading
import time
import weakref
from pathlib import Path

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lagom_overlap import OnlineTuner

dist.init_process_group("gloo")


def num_threads() -> int:
    """Those of gloo's channels, too."""
    return len([*Path("/proc/self/task").iterdir()])


def train() -> tuple[weakref.ref[object], ...]:
    model = DistributedDataParallel(torch.nn.Linear(512, 1024))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tuner = OnlineTuner(model, optimizer, tuner="random")
    for _ in range(15):
        with tuner.step():
            model(torch.ones(1, 512)).sum().backward()
            optimizer.step()
    assert any(thread.name.startswith("lagom") for thread in threading.enumerate())
    return weakref.ref(model), weakref.ref(tuner)


dist.all_reduce(torch.ones(1))
before = num_threads()
for _ in range(2):
    living = train()
    ours = ["lagom"]
    deadline = time.monotonic() + 60
    while (ours or num_threads() > before) and time.monotonic() < deadline:  # a thread ends when it is scheduled
        gc.collect()
        time.sleep(0.01)
        ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("lagom")]
    sys.stdout.write(f"{[each() is None for each in living]} {ours} {max(0, num_threads() - before)}\n")
    dist.barrier()
dist.destroy_process_group()
time.sleep(0.1)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)
