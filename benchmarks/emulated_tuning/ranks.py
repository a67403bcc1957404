"""Starts a command once per rank, as torchrun does, without importing torch: `ranks.py N COMMAND ...`."""

import os
import socket
import subprocess
import sys


def main() -> int:
    """The first exit code that is not 0."""
    num_ranks, command = int(sys.argv[1]), sys.argv[2:]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(command, env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    return next((code for code in [process.wait() for process in started] if code), 0)


if __name__ == "__main__":
    sys.exit(main())
