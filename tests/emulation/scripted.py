"""Ranks as scripts that speak to a coordinator, in whatever order a test delivers their records."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from lagom_emulate.clock import INSTANT, Operation, Work
from lagom_emulate.coordinator import Coordinator, Reply
from lagom_emulate.protocol import Host, Op, Query, Wait

LAUNCH_NS = 10


class ToyPrices:
    """Kernels take what their text says; two at once halve; a moving collective stretches kernels by half."""

    def __init__(self) -> None:
        self.durations: list[float] = []
        self.works: dict[bytes, Work] = {}

    def work(self, text: bytes) -> Work:
        if text not in self.works:
            said = json.loads(text)
            self.works[text] = self._new(said)
        return self.works[text]

    def communicator(self, text: bytes) -> str:
        return str(json.loads(text).get("comm", ""))

    def _new(self, said: dict[str, float]) -> Work:
        if "mark" in said:
            return INSTANT
        if "comm" in said:
            return Work(kind=int(said["ns"]), held_kind=int(said["ns"]) + 1, num_members=int(said["members"]))
        return Work(kind=-int(said["ns"]))

    def set_times(self, kinds: tuple[int, ...]) -> list[float]:
        computing = sum(kind < 0 for kind in kinds)
        moving = sum(kind >= 0 and kind % 2 == 0 for kind in kinds)
        return [-kind * computing * (1.5 if moving else 1.0) if kind < 0 else kind * (1 + computing) for kind in kinds]


@dataclass
class Rank:
    """A rank that runs a generator of ("op", ...), ("wait", op) and ("query", op); it goes on when it is answered."""

    number: int
    host_ns: int = 0
    last_op: int = 0
    ended: dict[int, tuple[int, int]] = field(default_factory=dict)
    descriptions: dict[str, int] = field(default_factory=dict)
    answers: list[bool] = field(default_factory=list)
    is_blocked: bool = False
    has_finished: bool = False

    def op(self, coordinator: Coordinator, stream: int, text: str, after: int = 0, instance: int = 0) -> int:
        if text and text not in self.descriptions:
            self.descriptions[text] = len(self.descriptions) + 1
            coordinator.describe(self.number, self.descriptions[text], text.encode())
        self.last_op += 1
        desc_id = self.descriptions.get(text, 0)
        coordinator.submit(
            self.number, Op(self.last_op, self.number, stream, desc_id, 0, self.host_ns, after, instance)
        )
        self.host_ns += LAUNCH_NS
        return self.last_op

    def wait(self, coordinator: Coordinator, op_id: int) -> None:
        coordinator.wait(self.number, Wait(op_id, self.host_ns, 1))
        self.is_blocked = True

    def query(self, coordinator: Coordinator, op_id: int) -> None:
        coordinator.query(self.number, Query(op_id, self.host_ns, 1, 0))
        self.is_blocked = True

    def finish(self, coordinator: Coordinator) -> None:
        coordinator.host(self.number, Host(self.host_ns, 1, 0))
        self.has_finished = True

    def answer(self, reply: Reply) -> None:
        self.host_ns = max(self.host_ns, reply.now_ns)
        self.ended |= {one.op_id: (one.start_ns, one.end_ns) for one in reply.ended}
        self.answers.append(reply.is_done)
        self.is_blocked = False


Script = Iterator[None]


def deliver(coordinator: Coordinator, ranks: list[Rank], scripts: dict[int, Script], choose) -> None:
    """One record at a time, of a rank that `choose` takes among those that are not blocked."""
    while not all(rank.has_finished for rank in ranks):
        able = [rank for rank in ranks if not rank.is_blocked and not rank.has_finished]
        assert able, coordinator.describe_waits()
        rank = choose(able)
        try:
            next(scripts[rank.number])
        except StopIteration:
            rank.finish(coordinator)
        for reply in coordinator.advance():
            ranks[reply.process].answer(reply)


def all_times(ended: list[Operation]) -> dict[tuple[int, int], tuple[float, float]]:
    return {(one.owner, one.op_id): (one.start_ns, one.end_ns) for one in ended}
