"""One rank of a job under the hooks of `lagom run --online` that goes on without its model and its process groups.

It prints the threads of ours while it has them, whether the model was gone when it dropped it, and the threads at last.
"""

import gc
import os
import sys
import threading
import time
import weakref
from pathlib import Path

os.environ["LAGOM_RUN_MODE"] = "online"
os.environ["LAGOM_RUN_FOLDER"] = str(Path.cwd())
from lagom_overlap.online import launch_hooks

launch_hooks.arm()
import torch  # noqa: E402
from torch import distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

# A forked Python has imported PyTorch before the hooks, so this is where they are.
groups = dist.distributed_c10d


def ours() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("lagom"))


groups.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(512, 1024))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(12):
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
during = ours()
living = weakref.ref(model), weakref.ref(model.module), weakref.ref(optimizer)
del model, optimizer
gc.collect()
are_gone = [each() is None for each in living]
dist.barrier()
groups.destroy_process_group()
deadline = time.monotonic() + 60
while ours() and time.monotonic() < deadline:  # a thread ends when it is scheduled
    time.sleep(0.01)
sys.stdout.write(f"{sorted({*during} - {'lagom-future'})} {are_gone} {ours()}\n")
time.sleep(0.1)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)
