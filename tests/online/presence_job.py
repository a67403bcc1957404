"""Ranks that hear of each other: threads of this process, or processes of `presence_rank`."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from job_of_threads import FakeStore

from forked_python import ForkedPython
from lagom_overlap.online.ranks.presence import Beyond, Gone, Left, Presence, Waits
from lagom_overlap.online.ranks.tree import post_of
from ports import free_port


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def until(holds: Callable[[], object]) -> None:
    """Returns once it does; a test's timeout is the limit."""
    while not holds():
        time.sleep(0.005)


class Rank(Presence):
    """One whose counts the test sets, and which notes how often it was asked for them, and told something."""

    def __init__(self, store: FakeStore, rank: int, num_ranks: int) -> None:
        self.issued = {"dp": 0}
        self.total = {"dp": 0, "pp": 0}
        self.marks: dict[str, int] = {}
        self.num_asked = 0
        self.num_heard = 0
        super().__init__(
            store, rank=rank, num_ranks=num_ranks, counts=self._counted, issued=self._all, marks=lambda: self.marks
        )
        self.start()

    def _all(self) -> dict[str, int]:
        return dict(self.total)

    def _counted(self) -> dict[str, int]:
        self.num_asked += 1
        return self.issued

    def hear(self, rank: int, message: Gone | Left | Waits | Beyond) -> None:
        self.num_heard += 1
        super().hear(rank, message)

    def waits(self, boundary: int) -> None:
        self.wait_at(boundary, dict(self.issued))

    @property
    def num_up(self) -> int:
        assert self._links is not None
        return sum(link.is_up for link in self._links._links)

    def vanish(self) -> None:
        """Its connections end without a goodbye."""
        self._has_left = True
        self.close()


class World:
    """Ranks of this process, which have met."""

    def __init__(self, num_ranks: int, *, starts: Callable[[range], Iterator[int]] = iter) -> None:
        self.store = FakeStore()
        self.ranks = {rank: Rank(self.store, rank, num_ranks) for rank in starts(range(num_ranks))}
        for rank in self.ranks.values():
            post = post_of(rank._rank, num_ranks)
            until(lambda rank=rank, post=post: rank.num_up == len(post.children) + (post.parent >= 0))

    def __getitem__(self, rank: int) -> Rank:
        return self.ranks[rank]

    def close(self) -> None:
        for rank in self.ranks.values():
            rank.close()


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    with contextlib.ExitStack() as stack:

        def make(num_ranks: int, **how: Callable[[range], Iterator[int]]) -> World:
            world = World(num_ranks, **how)
            stack.callback(world.close)
            return world

        yield make


class Processes:
    """Ranks as processes, which have met; `ask` says a line to one and returns its answer."""

    def __init__(self, num_ranks: int, host: str = "127.0.0.1", machines: dict[int, int] | None = None) -> None:
        port, script = free_port(), Path(__file__).parent / "presence_rank.py"
        self.num_ranks = num_ranks
        local = num_ranks if machines is None else 1
        self.ranks = [
            ForkedPython(
                script,
                [str(rank), str(num_ranks), str(port), host, "serves"],
                env=os.environ | {"LOCAL_WORLD_SIZE": str(local)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                machine=(machines or {}).get(rank),
            )
            for rank in range(num_ranks)
        ]
        for rank in range(num_ranks):
            self.ask(rank, f"meet {num_ranks - 1 if rank == 0 else 1}")

    def say(self, rank: int, line: str) -> None:
        stdin = self.ranks[rank].stdin
        assert stdin is not None
        stdin.write(f"{line}\n")
        stdin.flush()

    def hear(self, rank: int) -> str:
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        line: str = stdout.readline()
        assert line, f"rank {rank} has ended"
        return line.rstrip("\n")

    def ask(self, rank: int, line: str) -> str:
        self.say(rank, line)
        return self.hear(rank)

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()
            for pipe in (rank.stdin, rank.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


@pytest.fixture
def processes() -> Iterator[Callable[..., Processes]]:
    with contextlib.ExitStack() as stack:

        def make(*arguments: object, **how: object) -> Processes:
            made = Processes(*arguments, **how)  # type: ignore[arg-type]  # its own
            stack.callback(made.close)
            return made

        yield make
