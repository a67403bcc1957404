"""A process whose rings are harmed by somebody else between calls of NCCL's: it ends as if nothing had been."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from played_profiler import PlayedComm

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.nccl_plugin.fake_host import FakeNccl, load_fake_library
from lagom_overlap.nccl_plugin.library import TunerPlugin

NUM_CALLS = 2000


def replaced(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/full")


HARM = {
    "truncated": lambda path: os.truncate(path, 0),
    "halved": lambda path: os.truncate(path, path.stat().st_size // 2),
    "grown": lambda path: os.truncate(path, 4 * path.stat().st_size),
    "overwritten": lambda path: path.write_bytes(b"x" * 100),
    "deleted": Path.unlink,
    "replaced": replaced,
}


def main(library: str, fake: str, harm: str) -> None:
    plugin = TunerPlugin(Path(library))
    played = PlayedComm(Path(library), 6, 7)
    with FakeNccl(load_fake_library(Path(fake)), "2.30") as nccl:
        comm = nccl.comm()
        for path in (os.environ["LAGOM_RECORD"], os.environ["LAGOM_PROFILE"]):
            HARM[harm](Path(path))
        for _ in range(NUM_CALLS):
            comm.run(CollectiveKind.ALL_REDUCE, 1 << 20)
            played.run(played.launch("AllReduce", 4, "ncclInt8", 1), {0: (1, 2)})
        plugin.step()
        plugin.flush_profile()
        assert plugin.num_large() == NUM_CALLS
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
