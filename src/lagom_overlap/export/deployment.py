"""What a run found, ready to be written in one of the forms that a job reads."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from lagom_overlap.collective import (
    UNTOUCHED_LAUNCH,
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigTable,
    LaunchConfig,
)
from lagom_overlap.nccl_plugin.capability import BoxMaps
from lagom_overlap.nccl_plugin.size_ranges import CallSite
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Call sites and their configurations, for every process alike.

    `communicators` are all of a process in the order of their creation; `calls_per_step` says how often a call site is
    called in a step (0: not known; missing: the rows name every call), and names sites that are not tuned, too. Rows
    that are untouched are not there. `launch` is the computation's side of the whole process. `changed` are the knobs
    that differ from what the job runs by itself, by name; None: not known.
    """

    table: ConfigTable
    communicators: tuple[ProcessCommunicator, ...]
    calls_per_step: Mapping[CallSite, int] = field(default_factory=lambda: MappingProxyType({}))
    launch: LaunchConfig = UNTOUCHED_LAUNCH
    changed: frozenset[str] | None = None

    def changes(self, knob: str) -> bool:
        """Whether a knob may differ from what the job runs by itself."""
        return self.changed is None or knob in self.changed

    def sites(self) -> Iterator[tuple[CallSite, Mapping[int, CommConfig]]]:
        """Each call site with its rows by occurrence."""
        rows_by_site: dict[CallSite, dict[int, CommConfig]] = defaultdict(dict)
        for key, config in self.table:
            rows_by_site[key.communicator, key.kind, key.num_bytes][key.occurrence] = config
        yield from rows_by_site.items()

    def uniform(self, site: CallSite, rows: Mapping[int, CommConfig]) -> CommConfig | None:
        """The one configuration of all calls of a site; None if they differ, or some calls are untouched."""
        num_calls = self.calls_per_step.get(site, max(rows) + 1)
        first = next(iter(rows.values()))
        return first if len(rows) == num_calls and all(config == first for config in rows.values()) else None

    def safe_channels(self, site: CallSite, wanted: int | None) -> int | None:
        """The channels that a site may be given by whatever does not check them; None: NCCL's own.

        An all-gather is given none: NCCL 2.29 and 2.30 ask for an uneven all-gather as for an even one, and index their
        channels by the answer. What its communicator had in the run that found the setting is no limit of this one.
        """
        communicator, kind, _ = site
        if kind is CollectiveKind.ALL_GATHER or wanted is None:
            return None
        most = next((known.max_channels for known in self.communicators if known.id == communicator), None)
        return wanted if most is None else min(wanted, most)

    def num_nodes(self, communicator: CommunicatorId) -> int | None:
        """The nodes of a communicator; None if not known."""
        return next((known.num_nodes for known in self.communicators if known.id == communicator), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A file to be written; `not_carried` says in sentences what of the run it does not hold, and what to know.

    `is_empty`: nothing of the run fits the form.
    """

    name: str
    content: bytes
    not_carried: tuple[str, ...] = ()
    is_empty: bool = False


def site_words(site: CallSite) -> str:
    """A call site in words."""
    communicator, kind, num_bytes = site
    return f"{kind} of {num_bytes} bytes on {communicator.description!r} ({len(communicator.ranks)} ranks)"


def within_maps(deployment: Deployment, maps: BoxMaps) -> tuple[Deployment, tuple[str, ...]]:
    """The rows that this box's capability maps allow, and why others are left out; all where there is no map."""
    rows, refused = {}, []
    for key, config in deployment.table:
        num_nodes = deployment.num_nodes(key.communicator)
        box_map = maps.of(num_ranks=len(key.communicator.ranks), num_nodes=num_nodes)
        why = None if box_map is None else box_map.refuses(key.kind, config)
        if why is None:
            rows[key] = config
        else:
            site = key.communicator, key.kind, key.num_bytes
            refused.append(f"{site_words(site)}: left out, by this box's capability map: {why}")
    if not refused:
        return deployment, ()
    return replace(deployment, table=replace(deployment.table, rows=rows)), tuple(dict.fromkeys(refused))
