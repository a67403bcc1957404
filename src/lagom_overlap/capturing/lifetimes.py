"""Memory of a step: which operators touch each buffer, from its maker to its last user.

A gathered buffer and the parameters that FSDP2 copies it into count as one memory that lives from the gather on: the
two exist together during the copy only, before it only the buffer, after it only the parameters.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from lagom_overlap.workload import Buffer


@dataclass(slots=True)
class _Memory:
    """One stretch of memory: its bytes, the operators that touch it in order, whether it outlives the step."""

    num_bytes: int
    touched_by: list[int]
    is_kept: bool = False


class CaptureLifetimes:
    """Buffers by number, operators by number."""

    def __init__(self) -> None:
        self._memory: dict[int, _Memory] = {}
        self._copied_out: dict[int, set[int]] = {}

    def touch(self, buffer: int, num_bytes: int, operator: int) -> None:
        """`operator` reads or writes `buffer`."""
        memory = self._memory.setdefault(buffer, _Memory(num_bytes, []))
        if not memory.touched_by or memory.touched_by[-1] != operator:
            memory.touched_by.append(operator)

    def keep(self, buffer: int) -> None:
        """`buffer` outlives the step, if any operator touched it."""
        if buffer in self._memory:
            self._memory[buffer].is_kept = True

    def copied_out(self, gathered: int, parameter: int) -> None:
        """What was gathered in one buffer is copied into another."""
        self._copied_out.setdefault(gathered, set()).add(parameter)

    def buffers(self, names: Sequence[str], comms: Set[int]) -> tuple[Buffer, ...]:
        """The buffers by names of operators; `comms` are the operators that are collectives."""
        merged = {part for parts in self._copied_out.values() for part in parts}
        buffers_made = []
        for number, memory in self._memory.items():
            if number in merged or not memory.num_bytes:
                continue
            touched = self._from_gather(number, comms) if number in self._copied_out else memory.touched_by
            maker, *users = [names[place] for place in touched]
            buffers_made.append(
                Buffer(
                    name=f"{maker}:{number}",
                    num_bytes=memory.num_bytes,
                    maker=maker,
                    users=() if memory.is_kept else tuple(users or [maker]),
                )
            )
        return tuple(buffers_made)

    def _from_gather(self, number: int, comms: Set[int]) -> list[int]:
        """Who touches a gathered buffer or the parameters made of it, from the gather on."""
        touched = set(self._memory[number].touched_by)
        for part in self._copied_out[number]:
            touched.update(self._memory[part].touched_by)
        first = min(touched & comms, default=min(touched))
        return sorted(place for place in touched if place >= first)
