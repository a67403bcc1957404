"""Process groups by name: who is in them, and the groups that a plan adds."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import distributed as dist
from torch.distributed import distributed_c10d


class Groups(Protocol):
    """The process groups of one rank, by the names that functional collectives call them by."""

    def ranks(self, group: str) -> tuple[int, ...]:
        """The global ranks of a group, in order of their rank in it."""

    def position(self, group: str) -> int:
        """This rank's place in a group."""

    def made_of(self, ranks: tuple[int, ...], purpose: str) -> str:
        """A group of these ranks; the same name for the same ranks and purpose.

        Collective: all of `ranks` ask for the same groups in the same order.
        """


def process_group(name: str) -> dist.ProcessGroup:
    """The process group that a functional collective calls by that name."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]  # left out of the stubs


@dataclass(slots=True)
class ProcessGroups:
    """The groups of an initialised `torch.distributed`.

    A new group is made by its members alone, so that ranks that are not in it need not know of it. A `purpose` keeps
    apart groups of the same ranks: collectives on two streams need two groups, for within one their order must be the
    same on all ranks.
    """

    _made: dict[tuple[tuple[int, ...], str], str] = field(default_factory=dict)

    def ranks(self, group: str) -> tuple[int, ...]:
        """See `Groups`."""
        return tuple(dist.get_process_group_ranks(process_group(group)))

    def position(self, group: str) -> int:
        """See `Groups`."""
        return int(dist.get_rank(process_group(group)))

    def made_of(self, ranks: tuple[int, ...], purpose: str) -> str:
        """See `Groups`."""
        key = (ranks, purpose)
        if key not in self._made:
            group = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"lagom {purpose}")
            assert isinstance(group, dist.ProcessGroup), "this rank is a member"
            self._made[key] = str(group.group_name)
        return self._made[key]


def mesh_subgroup(ranks: tuple[int, ...], position: int, mesh: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The ranks that differ from the group's `position`-th one in their index along one axis of the mesh only.

    Centauri's group partition (spec, planners section 2.2): index k of rank r is (r // prod(mesh[k+1:])) % mesh[k].
    """
    stride = 1
    for size in mesh[axis + 1 :]:
        stride *= size
    first = position - (position // stride % mesh[axis]) * stride
    return tuple(ranks[first + index * stride] for index in range(mesh[axis]))
