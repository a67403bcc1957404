"""Call sites, named by what is the same on every rank; ranks exchange and save settings in these names.

A `ConfigKey` names one rank's communicator by its global ranks. Ranks of a job make the same calls on different
communicators of one role (each tensor-parallel pair has its own), and all communicators of a role get the same
settings. So exchanged and saved settings name the role: description, number of ranks, creation order.

**The place of a call in the step** is found from the sequence of calls on its communicator and from nothing else
(`CallCycle`). Each rank marks its own training steps, and the marks may differ: a rank skips an update, or runs an
optimizer that no other rank has. But all ranks of a communicator issue the same calls on it in the same order, or their
collectives would not match even without us. So a call's place is found by following that sequence through the calls of
one step (the *cycle*): equal sequences give equal places on every rank.

The rule (the plug-in has the same one in C, `csrc/lagom_tuner_look_up.c`): a call of some kind and size takes the next
place of such a call in the cycle, starting at the present place and wrapping around; a call that is not in the cycle
takes none and leaves the present place. After an evaluation, or a step cut short, the places are therefore right again
at the first call that occurs only once in the step.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from msgspec import UNSET, UnsetType

from lagom_overlap.collective.call import Collective, CollectiveKind
from lagom_overlap.collective.config import CommConfig
from lagom_overlap.collective.launch import LaunchConfig
from lagom_overlap.collective.size_class import class_bytes, is_small
from lagom_overlap.collective.space import CommunicatorId, ConfigKey, ConfigTable


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CallType:
    """What calls of one kind and size on communicators of one role share."""

    description: str
    num_ranks: int
    creation_order: int
    kind: CollectiveKind
    num_bytes: int

    @property
    def collective(self) -> Collective:
        """The call without its communicator."""
        return Collective(self.kind, self.num_bytes, self.num_ranks)


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """One call of a step: the `occurrence`-th of its type on this rank's communicator, counted from 0."""

    call: CallType
    occurrence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCycle:
    """The calls of one step on communicators of one role: kind and bytes, in the order of issue."""

    description: str
    num_ranks: int
    creation_order: int
    calls: tuple[tuple[CollectiveKind, int], ...]


Cycles = Mapping[CommunicatorId, tuple[ConfigKey, ...]]
"""One rank's communicators, and the calls of one step on each in the order of issue."""
NO_CYCLES: Final[Cycles] = MappingProxyType({})


class CallCycle:
    """Follows the calls of one communicator through `keys`: those of one step, in the order of issue.

    `size_octaves` is the width of the classes that the keys' sizes stand for.
    """

    def __init__(self, keys: Sequence[ConfigKey], size_octaves: int = 0) -> None:
        self.place = 0
        """The present place: the search for the next call starts here."""
        self._keys = tuple(keys)
        self._octaves = size_octaves
        self._places: dict[tuple[CollectiveKind, int], list[int]] = defaultdict(list)
        for place, key in enumerate(self._keys):
            self._places[key.kind, key.num_bytes].append(place)

    def next_key(self, kind: CollectiveKind, num_bytes: int) -> ConfigKey | None:
        """The key of the next call on the communicator; None if the step has no such call."""
        places = self._places.get((kind, class_bytes(num_bytes, self._octaves)))
        if places is None:
            return None
        index = bisect_left(places, self.place)
        place = places[index] if index < len(places) else places[0]
        self.place = (place + 1) % len(self._keys)
        return self._keys[place]


@dataclass(frozen=True, slots=True)
class SiteSetting:
    """How one site is to be run; `launch`, if set, how the concurrent computation is launched."""

    site: Site
    config: CommConfig
    launch: LaunchConfig | UnsetType = UNSET


def site_of(key: ConfigKey) -> Site:
    """The site of a rank's own key."""
    name = key.communicator
    call = CallType(
        description=name.description,
        num_ranks=len(name.ranks),
        creation_order=name.creation_order,
        kind=key.kind,
        num_bytes=key.num_bytes,
    )
    return Site(call, key.occurrence)


def key_of(site: Site) -> ConfigKey:
    """A key of the site whose communicator represents the role: its ranks are numbered from 0."""
    call = site.call
    name = standing_for(call.description, call.num_ranks, call.creation_order)
    return ConfigKey(communicator=name, kind=call.kind, num_bytes=call.num_bytes, occurrence=site.occurrence)


@lru_cache(maxsize=64)
def standing_for(description: str, num_ranks: int, creation_order: int) -> CommunicatorId:
    """The communicator that represents a role; its ranks are numbered from 0.

    Cached, so that all sites of a role share it: with 16,384 ranks each object takes 0.6 MB. The 64 entries only bound
    memory.
    """
    return CommunicatorId(description=description, ranks=tuple(range(num_ranks)), creation_order=creation_order)


def table_of(
    settings: Iterable[SiteSetting],
    communicators: Iterable[CommunicatorId],
    size_octaves: int = 0,
    *,
    cycles: Cycles = NO_CYCLES,
    lease_steps: int | None = None,
) -> ConfigTable:
    """The settings as this rank's table: a site gets the same setting on each of its communicators of the role."""
    mine: dict[tuple[str, int, int], list[CommunicatorId]] = defaultdict(list)
    for name in communicators:
        mine[name.description, len(name.ranks), name.creation_order].append(name)
    rows: dict[ConfigKey, CommConfig] = {}
    launches: dict[ConfigKey, LaunchConfig] = {}
    for setting in settings:
        site, call = setting.site, setting.site.call
        for name in mine.get((call.description, call.num_ranks, call.creation_order), ()):
            key = ConfigKey(communicator=name, kind=call.kind, num_bytes=call.num_bytes, occurrence=site.occurrence)
            if not setting.config.is_untouched:
                rows[key] = setting.config
            if isinstance(setting.launch, LaunchConfig) and not setting.launch.is_untouched:
                launches[key] = setting.launch
    return ConfigTable(rows, launches, size_octaves, cycles, lease_steps)


def cycles_of(calls: Iterable[ConfigKey]) -> Cycles:
    """The cycles of one rank's step, given its calls in the order of issue; calls below `LEAST_BYTES` are left out."""
    calls_of: dict[CommunicatorId, list[ConfigKey]] = defaultdict(list)
    for key in calls:
        if not is_small(key.num_bytes):
            calls_of[key.communicator].append(key)
    return {name: tuple(keys) for name, keys in calls_of.items()}


def role_cycles(cycles: Cycles) -> tuple[RoleCycle, ...]:
    """The cycles in a form that other ranks and later runs can read: the first cycle of each role."""
    roles: dict[tuple[str, int, int], RoleCycle] = {}
    for name, keys in cycles.items():
        role = name.description, len(name.ranks), name.creation_order
        calls = tuple((key.kind, key.num_bytes) for key in keys)
        roles.setdefault(role, RoleCycle(description=role[0], num_ranks=role[1], creation_order=role[2], calls=calls))
    return tuple(roles.values())


def cycles_for(roles: Sequence[RoleCycle], communicators: Iterable[CommunicatorId]) -> Cycles:
    """The cycles of this rank's communicators, by their roles."""
    by_role = {(role.description, role.num_ranks, role.creation_order): role.calls for role in roles}
    mine: dict[CommunicatorId, tuple[ConfigKey, ...]] = {}
    for name in communicators:
        calls = by_role.get((name.description, len(name.ranks), name.creation_order))
        if calls is not None:
            mine[name] = keys_of(name, calls)
    return mine


def keys_of(communicator: CommunicatorId, calls: Iterable[tuple[CollectiveKind, int]]) -> tuple[ConfigKey, ...]:
    """The keys of a step's calls on one communicator, given kind and bytes of each in the order of issue."""
    occurrences: Counter[tuple[CollectiveKind, int]] = Counter()
    keys = []
    for kind, num_bytes in calls:
        occurrence = occurrences[kind, num_bytes]
        keys.append(ConfigKey(communicator=communicator, kind=kind, num_bytes=num_bytes, occurrence=occurrence))
        occurrences[kind, num_bytes] += 1
    return tuple(keys)
