"""One rank of a job of `test_rank_presence` under the hooks of `lagom run`, or without; it prints who is absent.

Its arguments: what is to be absent of (a mode), and by rank what it does itself (`armed`, `bare`, `off`).
"""

import os
import sys
import time
from pathlib import Path

mode, does = sys.argv[1], sys.argv[2 + int(os.environ["RANK"])]
os.environ["LAGOM_RUN_MODE"] = "online" if does == "off" else does
os.environ["LAGOM_RUN_FOLDER"] = str(Path.cwd())
if does != "bare":
    from lagom_overlap.online import launch_hooks

    launch_hooks.arm()
if does == "off":
    os.environ["LAGOM_DISABLE"] = "1"
from torch import distributed as dist  # noqa: E402 - the hooks come first, as in a job

# A forked Python has imported PyTorch before the hooks, so this is where they are.
dist.distributed_c10d.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    from lagom_overlap import __version__
    from lagom_overlap.online.job_store import store_of
    from lagom_overlap.online.ranks.presence import absent

    sys.stdout.write(f"{absent(store_of('here', 60.0), dist.get_world_size(), mode, __version__)}\n")
dist.barrier()
dist.destroy_process_group()
time.sleep(0.1)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)
