"""Event simulation of a pipeline: every stage runs its slots in order, each waits for its neighbour's result.

A forward of model chunk c waits for the same micro-batch's forward of chunk c - 1, a backward for that of c + 1 (the
last chunk's backward for its own forward). Sending blocks the sender, its time is part of the slot, or takes
`transfer_s` during the sender's next slot (what the transfer takes from the concurrent products is not modelled). Of
Megatron-LM's schedules, where both ends wait: `sim.transfers`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lagom_overlap.workload.parallel import Slot


@dataclass(frozen=True, slots=True)
class SlotTimes:
    """Seconds of one forward and one backward of a stage through each of its chunks, sending included if it blocks.

    `transfer_s` passes between a slot's end and the arrival of what it sent; the sender goes on. `first_forward_s` are
    the forwards of the first micro-batch where they take longer.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    transfer_s: float = 0.0
    first_forward_s: tuple[float, ...] | None = None

    def of(self, slot: Slot) -> float:
        """Seconds of a slot."""
        if not slot.forward:
            return self.backward_s[slot.chunk]
        is_first = slot.micro_batch == 0 and self.first_forward_s is not None
        return (self.first_forward_s if is_first else self.forward_s)[slot.chunk]  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class SlotRun:
    """A slot of a stage with its start and end in seconds."""

    rank: int
    slot: Slot
    start_s: float
    end_s: float


class Pass(NamedTuple):
    """A micro-batch's forward or backward through a model chunk, counted over all stages."""

    forward: bool
    micro_batch: int
    chunk: int

    @classmethod
    def of(cls, slot: Slot, rank: int, num_stages: int) -> "Pass":
        """A slot of a stage."""
        return cls(slot.forward, slot.micro_batch, slot.chunk * num_stages + rank)

    def after(self) -> "Pass":
        """The one that needs its result; after the last chunk and before the first one there is none."""
        return Pass(self.forward, self.micro_batch, self.chunk + (1 if self.forward else -1))

    def before(self) -> "Pass":
        """The one whose result it needs; of the first chunk's forward and the last one's backward there is none."""
        return Pass(self.forward, self.micro_batch, self.chunk - (1 if self.forward else -1))


def run_pipeline(
    orders: Sequence[Sequence[Slot]], times: Sequence[SlotTimes], *, is_queued: bool = False
) -> tuple[tuple[SlotRun, ...], ...]:
    """Who runs when, per stage; `orders` and `times` are by stage.

    A result begins to travel as soon as it is there. `is_queued`: all that a stage sends and receives is in one queue,
    as in PyTorch's interleaved schedules; a transfer begins when it is the first one at both ends, too.

    Raises:
        ValueError: if the orders wait for each other in a circle.
    """
    num_stages, chunks = len(orders), len(times[0].forward_s)
    last = num_stages * chunks - 1
    queues = transfer_queues(orders, chunks) if is_queued else [[]] * num_stages
    computed: dict[Pass, float] = {}  # and not sent
    arrived: dict[Pass, float] = {}  # what a pass needs
    clocks, queue_clocks = [0.0] * num_stages, [0.0] * num_stages
    places, heads = [0] * num_stages, [0] * num_stages
    wanted: list[Pass | None] = [None] * num_stages
    runs: list[list[SlotRun]] = [[] for _ in range(num_stages)]

    def transfer(rank: int) -> int | None:
        """Makes the first transfer of a stage's queue if it can be made; its other end."""
        if heads[rank] == len(queues[rank]):
            return None
        sent = queues[rank][heads[rank]]
        source, target = sent.chunk % num_stages, sent.after().chunk % num_stages
        other = target if rank == source else source
        if sent not in computed or heads[other] == len(queues[other]) or queues[other][heads[other]] != sent:
            return None
        start_s = max(queue_clocks[rank], queue_clocks[other], computed.pop(sent))
        queue_clocks[rank] = queue_clocks[other] = arrived[sent.after()] = start_s + times[source].transfer_s
        heads[rank] += 1
        heads[other] += 1
        return other

    ready = list(range(num_stages))
    while ready:
        rank = ready.pop()
        order, own = orders[rank], times[rank]
        while places[rank] < len(order):
            slot = order[places[rank]]
            now = Pass.of(slot, rank, num_stages)
            before_s = 0.0 if now.forward and now.chunk == 0 else arrived.get(now)
            if before_s is None:
                wanted[rank] = now
                break
            start_s = max(clocks[rank], before_s)
            clocks[rank] = end_s = start_s + own.of(slot)
            runs[rank].append(SlotRun(rank, slot, start_s, end_s))
            places[rank] += 1
            after = now.after()
            if now.forward and now.chunk == last:
                arrived[Pass(False, now.micro_batch, last)] = end_s
            elif is_queued:
                computed[now] = end_s
            elif after.chunk >= 0:
                arrived[after] = end_s + own.transfer_s
                if wanted[other := after.chunk % num_stages] == after:
                    ready.append(other)
        while (partner := transfer(rank)) is not None:
            ready += (rank, partner)
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        raise ValueError("the stages' orders wait for each other in a circle")
    return tuple(tuple(run) for run in runs)


def transfer_queues(orders: Sequence[Sequence[Slot]], chunks: int) -> list[list[Pass]]:
    """Whose results each stage sends and receives, in PyTorch's order (`_add_send_recv`, 2.13 to 2.15).

    Stages take turns, each with its next slot if what that needs has been sent; behind it it sends, and the other end
    receives behind whatever it has issued by then. The schedule's idle places are gone before (`_add_unshard_reshard`),
    so that a receive may stand far before its result.
    """
    num_stages = len(orders)
    last = num_stages * chunks - 1
    queues: list[list[Pass]] = [[] for _ in orders]
    places = [0] * num_stages
    sent: set[Pass] = set()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            if places[rank] == len(order):
                continue
            slot = order[places[rank]]
            own = Pass.of(slot, rank, num_stages)
            needs = own.chunk > 0 if own.forward else own.chunk < last
            if needs and own not in sent:
                continue
            if 0 <= own.after().chunk <= last:
                queues[rank].append(own)
                queues[own.after().chunk % num_stages].append(own)
                sent.add(own.after())
            places[rank] += 1
            moved = True
    return queues
