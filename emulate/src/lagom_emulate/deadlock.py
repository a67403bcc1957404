"""Kernels of collectives that wait for each other in a circle: NCCL hangs there, whatever the hosts still do.

A kernel that has started waits for its other members. Where a member has been issued, but lies behind another kernel
that waits in the same way (on its stream, or by an event), one waits for the other; a circle of them never ends.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lagom_emulate.clock import Operation


class Blocked(NamedTuple):
    """A kernel that has started, and the process of a member of it that lies behind the next one of the circle."""

    kernel: Operation
    awaits: int


def circle_of(started: Iterable[Operation]) -> list[Blocked]:
    """The first circle among kernels that have started and lack members, from its lowest process on; empty: none."""
    waiting = [operation for operation in started if operation.run is not None]
    behind = [_behind(operation) for operation in waiting]
    edges: list[list[int]] = []
    for operation in waiting:
        assert operation.run is not None
        lacking = [id(member) for member in operation.run.members if member.start_ns < 0.0]
        edges.append([at for at, those in enumerate(behind) if any(member in those for member in lacking)])
    found = _first_circle(edges)
    if not found:
        return []
    first = min(range(len(found)), key=lambda place: waiting[found[place]].owner)
    order = [*found[first:], *found[:first]]
    owners = [waiting[at].owner for at in order]
    return [Blocked(waiting[at], owners[(place + 1) % len(order)]) for place, at in enumerate(order)]


def _behind(operation: Operation) -> set[int]:
    """What cannot start before an operation has ended, by identity."""
    found: set[int] = set()
    left = [operation]
    while left:
        one = left.pop()
        for later in (*one.followers, *([one.behind] if one.behind is not None else [])):
            if id(later) not in found:
                found.add(id(later))
                left.append(later)
    return found


def _first_circle(edges: Sequence[Sequence[int]]) -> list[int]:
    """The places of a circle in a graph, in its order; a walk in depth that leaves what it has seen to its end."""
    done: set[int] = set()
    for start in range(len(edges)):
        path, choices = [start], [iter(edges[start])]
        while path:
            following = next(choices[-1], None)
            if following is None:
                done.add(path.pop())
                choices.pop()
            elif following in path:
                return path[path.index(following) :]
            elif following not in done:
                path.append(following)
                choices.append(iter(edges[following]))
    return []
