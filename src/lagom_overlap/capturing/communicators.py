"""Process groups by a description that is the same in every run, and the ranks of each."""

import torch.distributed as dist

_UNDESCRIBED = ("", "undefined")
_DEFAULT = "default_pg"


class Communicators:
    """The groups that a step uses; groups with one description are told apart by a number.

    The default group is called `world`, or what `name_world` says where a mesh dimension takes its place.
    """

    def __init__(self) -> None:
        self.ranks: dict[str, tuple[int, ...]] = {}
        self._names: dict[str, str] = {}
        self._world = "world"

    def name_world(self, name: str) -> None:
        """What the default process group is called."""
        self._world = name

    def name_of(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> str:
        """The description of a group of at least two ranks."""
        known = self._names.get(group.group_name)
        if known is not None:
            return known
        described = group.group_desc.removeprefix("mesh_")
        if described == _DEFAULT:
            described = self._world
        elif described in _UNDESCRIBED:
            described = "group"
        unique, number = described, 2
        while unique in self.ranks:
            unique, number = f"{described}_{number}", number + 1
        self._names[group.group_name] = unique
        self.ranks[unique] = ranks
        return unique
