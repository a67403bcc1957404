"""One emulated host's ranks, as torchrun starts them: `python hosts_job.py RANKS_PER_HOST FOLDER`."""

import os
import subprocess
import sys
from pathlib import Path

local, folder = int(sys.argv[1]), sys.argv[2]
num_ranks, first = local * int(os.environ["PET_NNODES"]), local * int(os.environ["PET_NODE_RANK"])
program = str(Path(__file__).parents[1] / "emulated_gpu" / "nccl_ranks.py")
ranks = [
    subprocess.Popen(
        [sys.executable, program, "hosts", str(rank), str(num_ranks), folder],
        env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LAGOM_TEST_GPUS": str(local)},
    )
    for rank in range(first, first + local)
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
