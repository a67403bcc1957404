"""A rank that runs the programs of one suite and says of each whether all bits agree; started by test_adapters.py.

python adapter_job.py RANK WORLD PORT SUITE
"""

import json
import logging
import os
import sys
import warnings

import torch
from adapter_calls import CALLS
from adapter_ddp import DDP
from adapter_fsdp2 import FSDP2
from torch import distributed as dist

from small_messages import make_small

SUITES = {"fsdp2": FSDP2, "ddp": DDP, "calls": CALLS}


def main() -> None:
    rank, world, port, suite = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    logging.basicConfig(level=logging.INFO)
    warnings.filterwarnings("ignore", category=FutureWarning)  # the deprecated names are called on purpose
    torch.set_num_threads(1)
    make_small()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    for name, scenario in SUITES[suite].items():
        sys.stderr.write(f"rank {rank}: {name}\n")
        found = scenario()
        sys.stdout.write(f"{json.dumps({'name': name, **found})}\n")
        sys.stdout.flush()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)


if __name__ == "__main__":
    main()
