"""Two ranks on the emulated driver and NCCL's stand-in: collectives of three sizes, without PyTorch."""

import ctypes as c
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "emulated_gpu"))

from nccl_ranks import BFLOAT16, SUM, Nccl

SIZES = (1 << 20, 16 << 20, 128 << 20)


def rank_main(rank: int, folder: Path) -> None:
    nccl = Nccl(rank, 2, folder)
    comm = nccl.init()
    for num_bytes in SIZES:
        at = nccl.buffer(num_bytes)
        nccl.call("ncclAllReduce", at, at, c.c_size_t(num_bytes // 2), BFLOAT16, SUM, comm, nccl.stream)
    assert nccl.cuda.cuStreamSynchronize(nccl.stream) == 0
    nccl.call("ncclCommDestroy", comm)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if len(sys.argv) == 3:
        rank_main(int(sys.argv[2]), folder)
    else:
        ranks = [
            subprocess.Popen([sys.executable, __file__, str(folder), str(r)], env=os.environ | {"RANK": str(r)})
            for r in (0, 1)
        ]
        sys.exit(max(rank.wait() for rank in ranks))
