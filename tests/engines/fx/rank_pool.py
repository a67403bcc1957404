"""Gloo ranks that run functions of `rank_cases`: started once, because joining and compiling take seconds."""

import contextlib
import os
import pickle
import subprocess
import sys

from forked_python import COMPILER, ONE_COMPILER, ForkedPython


class RankPool:
    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self._start()

    def _start(self):
        self._ranks = []
        self._is_asked = False
        port = None
        for rank in range(self.num_ranks):
            process = ForkedPython(
                __file__,
                [str(rank), str(self.num_ranks), str(port or 0)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=False,
                env={**os.environ, **ONE_COMPILER, "GLOO_SOCKET_IFNAME": "lo"},
                imports=COMPILER,
            )
            self._ranks.append(process)
            if rank == 0:
                port = pickle.load(process.stdout)

    def call(self, function, *arguments, ranks=None):
        """Runs `function(*arguments)` on the ranks (default: all); results by rank. All join what is collective."""
        if self._is_asked:  # a test ended before its answers came: the next one would read them as its own
            self.close()
            self._start()
        chosen = self._ranks if ranks is None else [self._ranks[rank] for rank in ranks]
        self._is_asked = True
        for process in chosen:
            pickle.dump((function, arguments), process.stdin)
            process.stdin.flush()
        outcomes = [pickle.load(process.stdout) for process in chosen]
        self._is_asked = False
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def close(self):
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()


def _serve(rank, num_ranks, port):
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import rank_cases
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pickle.dump(store.port, replies)
        replies.flush()
    else:
        store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        try:
            outcome = getattr(rank_cases, function)(*arguments)
        except Exception as error:
            outcome = error
        pickle.dump(outcome, replies)
        replies.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
