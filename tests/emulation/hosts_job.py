"""One emulated host's ranks, as torchrun starts them: `hosts_job.py RANKS_PER_HOST FOLDER PROGRAM FUNCTION`."""

import os
import subprocess
import sys
from pathlib import Path

local, folder, program, function = int(sys.argv[1]), *sys.argv[2:]
symmetric = os.environ.get("LAGOM_EMULATION_SYMMETRIC_HOSTS")
num_ranks = local * int(symmetric or os.environ["PET_NNODES"])
first = local * int(os.environ.get("PET_NODE_RANK", "0"))
path = str(Path(__file__).parents[1] / "emulated_gpu" / program)
given = {"WORLD_SIZE": str(local if symmetric else num_ranks), "LOCAL_WORLD_SIZE": str(local)}
ranks = [
    subprocess.Popen(
        [sys.executable, path, function, str(rank), str(num_ranks), folder],
        env=os.environ | given | {"RANK": str(rank), "LAGOM_TEST_GPUS": str(local)},
    )
    for rank in range(first, first + local)
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
