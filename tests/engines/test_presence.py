"""Signs of life through a store: whoever fails, falls silent or loses the store ends the others."""

import threading
from queue import SimpleQueue

import pytest

from lagom_overlap.engines.gloo_worker import SignOfLife


class DictStore:
    """What ranks that are threads share."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.is_gone = False

    def _check(self) -> None:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self._check()
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        self._check()
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._check()
        return self.values.setdefault(key, desired.encode())


def ranks(store: DictStore, num_ranks: int, silence_s: float = 60.0) -> tuple[list[SignOfLife], "SimpleQueue[str]"]:
    ended: SimpleQueue[str] = SimpleQueue()
    made = [
        SignOfLife(lambda: store, rank=rank, num_ranks=num_ranks, end=ended.put, beat_s=0.01, silence_s=silence_s)
        for rank in range(num_ranks)
    ]
    return made, ended


def test_a_rank_that_fails_ends_all_others_with_its_words() -> None:
    made, ended = ranks(DictStore(), 3)
    made[1].fail("failed: no route to host")
    assert [ended.get(timeout=30) for _ in range(2)] == ["rank 1 failed: no route to host"] * 2


@pytest.mark.parametrize(("silent", "deaf"), [(0, 1), (1, 0)])
def test_a_rank_that_falls_silent_is_missed(silent: int, deaf: int) -> None:
    made, ended = ranks(DictStore(), 2, silence_s=0.5)
    made[silent].close()
    assert ended.get(timeout=30) == f"rank {silent} was not heard for 0.5 s"
    made[deaf].close()


def test_a_store_that_is_gone_ends_all() -> None:
    store = DictStore()
    _, ended = ranks(store, 2)
    store.is_gone = True
    words = [ended.get(timeout=30) for _ in range(2)]
    assert words == ["the launcher's store is gone: Connection reset by peer"] * 2


def test_after_its_end_a_rank_misses_nobody() -> None:
    store = DictStore()
    made, ended = ranks(store, 2)
    for each in made:
        each.close()
    store.is_gone = True
    names = ("lagom-presence",)
    for thread in [thread for thread in threading.enumerate() if thread.name in names]:
        thread.join(30)
    assert ended.empty()
