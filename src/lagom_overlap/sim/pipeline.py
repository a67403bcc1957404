"""Event simulation of a pipeline: every stage runs its slots in order, each waits for its neighbour's result.

A forward of model chunk c waits for the same micro-batch's forward of chunk c - 1, a backward for that of c + 1 (the
last chunk's backward for its own forward). Sending blocks the sender, its time is part of the slot (Megatron-LM waits
for every point-to-point before it goes on), or takes `transfer_s` during the sender's next slot (its interleaved
schedule with `overlap_p2p_comm`; what the transfer takes from the concurrent products is not modelled).
"""

from collections.abc import Sequence
from dataclasses import dataclass

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


def run_pipeline(orders: Sequence[Sequence[Slot]], times: Sequence[SlotTimes]) -> tuple[tuple[SlotRun, ...], ...]:
    """Who runs when, per stage; `orders` and `times` are by stage.

    Raises:
        ValueError: if the orders wait for each other in a circle.
    """
    num_stages, chunks = len(orders), len(times[0].forward_s)
    last = num_stages * chunks - 1
    ends: dict[tuple[bool, int, int], float] = {}  # where they are needed
    clocks, places = [0.0] * num_stages, [0] * num_stages
    runs: list[list[SlotRun]] = [[] for _ in range(num_stages)]
    waiting: dict[tuple[bool, int, int], int] = {}
    ready = list(range(num_stages))
    while ready:
        rank = ready.pop()
        order = orders[rank]
        while places[rank] < len(order):
            slot = order[places[rank]]
            chunk = slot.chunk * num_stages + rank
            if slot.forward:
                need = (True, slot.micro_batch, chunk - 1) if chunk else None
            else:
                need = (False, slot.micro_batch, chunk + 1) if chunk < last else (True, slot.micro_batch, chunk)
            if need is not None and need not in ends:
                waiting[need] = rank
                break
            start = max(clocks[rank], ends[need] if need is not None else 0.0)
            own = times[rank]
            end = start + own.of(slot)
            runs[rank].append(SlotRun(rank, slot, start, end))
            clocks[rank], places[rank] = end, places[rank] + 1
            key = (slot.forward, slot.micro_batch, chunk)
            is_sent = chunk < last if slot.forward else chunk > 0
            ends[key] = end + (own.transfer_s if is_sent else 0.0)
            if key in waiting:
                ready.append(waiting.pop(key))
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        raise ValueError("the stages' orders wait for each other in a circle")
    return tuple(tuple(run) for run in runs)


def run_queued_pipeline(
    orders: Sequence[Sequence[Slot]], times: Sequence[SlotTimes]
) -> tuple[tuple[SlotRun, ...], ...]:
    """The same where all that a stage sends and receives is in one queue, as in PyTorch's interleaved schedules.

    A transfer begins when it is the first one at both ends and its result is there, and takes the sender's
    `transfer_s`; computations go on meanwhile.

    Raises:
        ValueError: if the orders wait for each other in a circle.
    """
    num_stages, chunks = len(orders), len(times[0].forward_s)
    last = num_stages * chunks - 1
    queues = transfer_queues(orders, chunks)
    computed: dict[_Pass, float] = {}
    arrived: dict[_Pass, float] = {}
    clocks, queue_clocks = [0.0] * num_stages, [0.0] * num_stages
    places, heads = [0] * num_stages, [0] * num_stages
    runs: list[list[SlotRun]] = [[] for _ in range(num_stages)]

    def compute(rank: int) -> bool:
        if places[rank] == len(orders[rank]):
            return False
        slot = orders[rank][places[rank]]
        own = _Pass(slot.forward, slot.micro_batch, slot.chunk * num_stages + rank)
        if own.forward or own.chunk < last:
            before = arrived.get(own, 0.0 if own.forward and own.chunk == 0 else None)
        else:
            before = computed.get(_Pass(True, own.micro_batch, own.chunk))
        if before is None:
            return False
        start = max(clocks[rank], before)
        clocks[rank] = computed[own] = start + times[rank].of(slot)
        runs[rank].append(SlotRun(rank, slot, start, clocks[rank]))
        places[rank] += 1
        return True

    def transfer(rank: int) -> int | None:
        """The other end of a transfer that could be made."""
        if heads[rank] == len(queues[rank]):
            return None
        head = queues[rank][heads[rank]]
        source, target = head.sent.chunk % num_stages, head.sent.after().chunk % num_stages
        other = target if rank == source else source
        if (
            head.sent not in computed
            or heads[other] == len(queues[other])
            or queues[other][heads[other]].sent != head.sent
        ):
            return None
        start = max(queue_clocks[rank], queue_clocks[other], computed[head.sent])
        queue_clocks[rank] = queue_clocks[other] = arrived[head.sent.after()] = start + times[source].transfer_s
        heads[rank] += 1
        heads[other] += 1
        return other

    ready = list(range(num_stages))
    while ready:
        rank = ready.pop()
        moved = compute(rank)
        other = transfer(rank)
        if moved or other is not None:
            ready += {rank, (rank - 1) % num_stages, (rank + 1) % num_stages}
        if other is not None:
            ready += {other, (other - 1) % num_stages, (other + 1) % num_stages}
    if any(place < len(order) for place, order in zip(places, orders, strict=True)):
        raise ValueError("the stages' orders wait for each other in a circle")
    return tuple(tuple(run) for run in runs)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A micro-batch's forward or backward through a model chunk, counted over all stages."""

    forward: bool
    micro_batch: int
    chunk: int

    def after(self) -> "_Pass":
        """The one that needs its result."""
        return _Pass(self.forward, self.micro_batch, self.chunk + (1 if self.forward else -1))


@dataclass(frozen=True, slots=True)
class Queued:
    """An end of a transfer in a stage's queue: whose result it is, and whether this end sends it."""

    sent: _Pass
    sends: bool


def transfer_queues(orders: Sequence[Sequence[Slot]], chunks: int) -> list[list[Queued]]:
    """Each stage's sends and receives in the order in which PyTorch issues them (`_add_send_recv`, 2.13 to 2.15).

    Stages take turns, each with its next slot if what that needs has been sent; behind it it sends, and the other end
    receives behind whatever it has issued by then. The schedule's idle places are gone before (`_add_unshard_reshard`),
    so that a receive may stand far before its result.
    """
    num_stages = len(orders)
    last = num_stages * chunks - 1
    queues: list[list[Queued]] = [[] for _ in orders]
    places = [0] * num_stages
    sent: set[_Pass] = set()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            if places[rank] == len(order):
                continue
            slot = order[places[rank]]
            own = _Pass(slot.forward, slot.micro_batch, slot.chunk * num_stages + rank)
            needs = own.chunk > 0 if own.forward else own.chunk < last
            if needs and own not in sent:
                continue
            if 0 <= own.after().chunk <= last:
                queues[rank].append(Queued(own, sends=True))
                queues[own.after().chunk % num_stages].append(Queued(own, sends=False))
                sent.add(own.after())
            places[rank] += 1
            moved = True
    return queues
