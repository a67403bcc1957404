"""A job that speaks the protocol itself: `python client_job.py RANKS [what]` starts its ranks, as torchrun does.

On several hosts it starts those of its own: RANKS in all, numbered by torchrun's variables. Of symmetric hosts it is
the first.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from lagom_emulate.protocol import Completed, Describe, Hello, Host, Op, Wait, decode_reply, encode

SYMMETRIC = os.environ.get("LAGOM_EMULATION_SYMMETRIC_HOSTS")
NUM_HOSTS, HOST = (int(os.environ.get(f"PET_{name}", value)) for name, value in (("NNODES", 1), ("NODE_RANK", 0)))
NUM_HOSTS = int(SYMMETRIC or NUM_HOSTS)
GEMM = {"gemm": {"m": 4096, "n": 4096, "k": 4096, "batch": 1, "dtype": "bf16"}}


class Client:
    def __init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.environ["LAGOM_EMULATION_SOCKET"])
        self.rank = int(os.environ["RANK"])
        self.host_ns, self.last_op, self.known, self.data = 0, 0, {}, b""
        host = json.loads(Path(os.environ["LAGOM_EMULATION_GPU"]).read_text())["host_index"]
        self.socket.sendall(encode(Hello(1, self.rank, os.getpid(), host)))

    def op(self, description: dict[str, object], stream: int = 0, instance: int = 0, after: int = 0) -> int:
        text = json.dumps(description).encode()
        if text not in self.known:
            self.known[text] = len(self.known) + 1
            self.socket.sendall(encode(Describe(self.known[text], text)))
        self.last_op += 1
        self.socket.sendall(
            encode(Op(self.last_op, self.rank, stream, self.known[text], 0, self.host_ns, after, instance))
        )
        self.host_ns += 5000
        return self.last_op

    def wait(self, op_id: int) -> None:
        self.socket.sendall(encode(Wait(op_id, self.host_ns, 1)))
        while True:
            reply, size = decode_reply(self.data)
            self.data = self.data[size:]
            if isinstance(reply, str):
                sys.exit(f"refused: {reply}")
            if isinstance(reply, Completed):
                self.host_ns = max(self.host_ns, reply.now_ns)
                return
            more = self.socket.recv(1 << 16)
            if not more:
                sys.exit("the coordinator has gone")
            self.data += more

    def meet(self, num_ranks: int) -> None:
        """Returns when every rank is known to the clock, as after a rendezvous: who comes late begins late."""
        self.wait(0)
        here = Path(os.environ["LAGOM_EMULATION_SOCKET"]).parent
        (here / f"met-{self.rank}").touch()
        while not all((here / f"met-{rank}").exists() for rank in range(num_ranks)):
            time.sleep(0.002)


def rank(num_ranks: int, what: str) -> None:
    client = Client()
    if what == "garbage":
        client.socket.sendall(b"\xff" * 64)
        client.wait(1)
    client.meet(num_ranks // NUM_HOSTS if SYMMETRIC else num_ranks)
    reduce = {
        "collective": {
            "nodes": NUM_HOSTS,
            "comm": "c0",
            "kind": "all_reduce",
            "bytes": 64 << 20,
            "num_ranks": num_ranks,
            "present": num_ranks // NUM_HOSTS if SYMMETRIC else 0,
            "rank": client.rank,
            "algorithm": "RING",
            "protocol": "SIMPLE",
            "num_channels": 8,
            "num_threads": 512,
            "chunk_bytes": 524288,
        }
    }
    for step in range(4):
        client.op({"mark": {"step": "begin"}})
        for _ in range(8):
            last = client.op(GEMM)
        if what == "one_host_fails" and step == 2:
            sys.exit(7) if HOST else time.sleep(600)
        if client.rank == 1 and what == "die" and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if client.rank == 1 and what == "mismatch" and step == 2:
            client.wait(last)
            client.wait(client.op(reduce | {"collective": reduce["collective"] | {"comm": "other"}}, 1, 0))
        last = client.op(reduce, stream=1, instance=step, after=last)
        client.wait(last)
        if what == "sleep":
            time.sleep(600)
    client.op({"mark": {"peak_bytes": 5_000_000_000}})
    client.socket.sendall(encode(Host(client.host_ns, 1, 0)))


def main() -> None:
    num_ranks, what = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    if "RANK" in os.environ:
        rank(num_ranks, what)
        return
    local = num_ranks // NUM_HOSTS
    started = local if SYMMETRIC else num_ranks
    children = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:]],
            env=os.environ | {"RANK": str(number), "WORLD_SIZE": str(started), "LOCAL_WORLD_SIZE": str(local)},
            start_new_session=True,
        )
        for number in range(HOST * local, (HOST + 1) * local)
    ]
    sys.exit(max(abs(child.wait()) for child in children))


if __name__ == "__main__":
    main()
