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
