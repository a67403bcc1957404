"""Call sites by what is the same on every rank: the vocabulary in which ranks speak of settings.

A `ConfigKey` names one rank's communicator by its global ranks. Ranks of a job make the same calls on different
communicators of one role (each tensor-parallel pair its own), and all of a role are set alike, so what is exchanged and
saved names the role: description, number of ranks, creation order.
"""

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
from lagom_overlap.collective.size_class import LEAST_BYTES
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
    """One call of a step: the `occurrence`-th of its type on this rank's communicator, from 0."""

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
    """A key of the site, its communicator standing for its role: the ranks are numbered from 0."""
    call = site.call
    name = standing_for(call.description, call.num_ranks, call.creation_order)
    return ConfigKey(communicator=name, kind=call.kind, num_bytes=call.num_bytes, occurrence=site.occurrence)


@lru_cache(maxsize=64)
def standing_for(description: str, num_ranks: int, creation_order: int) -> CommunicatorId:
    """The communicator of a role, its ranks numbered from 0.

    One for all sites of it: of 16,384 ranks, each takes 0.6 MB.
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
    """The settings as a table of this rank: each site is set alike on every communicator that it has of the role."""
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
    """The cycles of one rank's step, given its calls in the order of issue; small calls are part of none."""
    found: dict[CommunicatorId, list[ConfigKey]] = defaultdict(list)
    for key in calls:
        if key.num_bytes >= LEAST_BYTES:
            found[key.communicator].append(key)
    return {name: tuple(keys) for name, keys in found.items()}


def role_cycles(cycles: Cycles) -> tuple[RoleCycle, ...]:
    """The cycles as another rank, or a later run, can read them: of each role the first."""
    found: dict[tuple[str, int, int], RoleCycle] = {}
    for name, keys in cycles.items():
        role = name.description, len(name.ranks), name.creation_order
        calls = tuple((key.kind, key.num_bytes) for key in keys)
        found.setdefault(role, RoleCycle(description=role[0], num_ranks=role[1], creation_order=role[2], calls=calls))
    return tuple(found.values())


def cycles_for(roles: Sequence[RoleCycle], communicators: Iterable[CommunicatorId]) -> Cycles:
    """The cycles of this rank's communicators, by their roles."""
    by_role = {(role.description, role.num_ranks, role.creation_order): role.calls for role in roles}
    found: dict[CommunicatorId, tuple[ConfigKey, ...]] = {}
    for name in communicators:
        calls = by_role.get((name.description, len(name.ranks), name.creation_order))
        if calls is not None:
            found[name] = keys_of(name, calls)
    return found


def keys_of(communicator: CommunicatorId, calls: Iterable[tuple[CollectiveKind, int]]) -> tuple[ConfigKey, ...]:
    """The keys of a step's calls on one communicator, given kind and bytes of each in the order of issue."""
    seen: Counter[tuple[CollectiveKind, int]] = Counter()
    keys = []
    for kind, num_bytes in calls:
        occurrence = seen[kind, num_bytes]
        keys.append(ConfigKey(communicator=communicator, kind=kind, num_bytes=num_bytes, occurrence=occurrence))
        seen[kind, num_bytes] += 1
    return tuple(keys)
