"""A backend over a model that was fitted to a trace: what the trace ran is the default, nothing is run.

Not an entry point: it needs the groups and the fit (`lagom tune --from-trace`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lagom_overlap.backends.base import BackendRequest
from lagom_overlap.backends.simulated import SimulatedBackend
from lagom_overlap.collective import CommConfig, ConfigSpace, Subspace
from lagom_overlap.cost import ContentionModel
from lagom_overlap.nccl_plugin.support import Knob, NcclVersion, Settable, best_route, support_of
from lagom_overlap.trace.gpu_trace import KnobReach
from lagom_overlap.tuners.problem import Assignment, GroupProblem, Outcome, corners
from lagom_overlap.workload import OverlapGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedDefault:
    """What the trace ran for each collective of a group, which knobs reach it, and its communicator's channels.

    `most_channels` are the most that any collective of the communicator ran with: no route gives it more.
    """

    configs: Assignment
    reaches: tuple[KnobReach, ...]
    most_channels: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.configs) == len(self.reaches) == len(self.most_channels):
            raise ValueError(f"{len(self.configs)} configurations, {len(self.reaches)} reaches")


def only(config: CommConfig) -> ConfigSpace:
    """The space of a collective that no knob reaches."""
    return ConfigSpace(
        (
            Subspace(
                algorithm=config.algorithm,
                protocol=config.protocol,
                transport=config.transport,
                num_channels=(config.num_channels,),
                num_threads=(config.num_threads,),
                chunk_bytes=(config.chunk_bytes,),
            ),
        )
    )


def settable(
    space: ConfigSpace, config: CommConfig, *, reach: KnobReach, most_channels: int, nccl: NcclVersion
) -> ConfigSpace:
    """What of a space some route of ours can set in the job that was traced; `config` is what it ran."""
    knob = Knob.ALL_TO_ALL_CHANNELS if reach is KnobReach.P2P_CHANNELS else Knob.CHANNELS
    if reach is KnobReach.NONE or best_route(nccl, knob) is None:
        return only(config)
    kept = []
    for part in space.subspaces:
        is_own = (part.algorithm, part.protocol, part.transport) == (
            config.algorithm,
            config.protocol,
            config.transport,
        )
        if not is_own and (reach is KnobReach.P2P_CHANNELS or not _can_switch(part, config, nccl)):
            continue
        most = most_channels
        if reach is KnobReach.P2P_CHANNELS or _is_lower_only(nccl):
            most = min(most, config.num_channels or most)
        channels = tuple(count for count in part.num_channels if count is not None and count <= most)
        if reach is KnobReach.P2P_CHANNELS:
            channels = tuple(count for count in channels if count == config.num_channels or count & (count - 1) == 0)
        chunks = part.chunk_bytes
        if reach is KnobReach.P2P_CHANNELS or best_route(nccl, Knob.CHUNK) is None:
            chunks = (config.chunk_bytes,) if is_own else part.chunk_bytes[-1:]  # a protocol's largest is NCCL's own
        elif is_own:
            chunks = tuple(size for size in chunks if (size or 0) <= (config.chunk_bytes or 0)) or (config.chunk_bytes,)
        threads = part.num_threads if best_route(nccl, Knob.THREADS) is not None else (config.num_threads,)
        if channels:
            kept.append(replace(part, num_channels=channels, num_threads=threads, chunk_bytes=chunks))
    return ConfigSpace(tuple(kept)) if kept else only(config)


def _can_switch(part: Subspace, config: CommConfig, nccl: NcclVersion) -> bool:
    """Whether a route sets another algorithm and protocol; none sets the transport."""
    return part.transport == config.transport and best_route(nccl, Knob.PROTOCOL) is not None


def _is_lower_only(nccl: NcclVersion) -> bool:
    """Whether the route of channels can only take some away."""
    route = best_route(nccl, Knob.CHANNELS)
    return route is not None and support_of(nccl)[route][Knob.CHANNELS].reach is Settable.LOWER


class TracedBackend:
    """Implements `Backend`: the simulator, with the trace's own settings as the default of every group."""

    def __init__(
        self,
        model: ContentionModel,
        request: BackendRequest,
        defaults: Mapping[str, TracedDefault],
        nccl: NcclVersion,
    ) -> None:
        self._inner = SimulatedBackend(model, request)
        self._defaults = dict(defaults)
        self._nccl = nccl
        gpu = model.cluster.gpu.name
        self.description = f"predicted from a trace: the contention model on {gpu}, fitted to it; nothing was run"

    def problem(self, group: OverlapGroup) -> GroupProblem:
        """See `Backend`."""
        inner, own_default = self._inner.problem(group), self._defaults[group.name]
        spaces = tuple(
            settable(space, config, reach=reach, most_channels=most, nccl=self._nccl)
            for space, config, reach, most in zip(
                inner.spaces, own_default.configs, own_default.reaches, own_default.most_channels, strict=True
            )
        )
        homes = [_home(space, config) for space, config in zip(spaces, own_default.configs, strict=True)]
        return replace(
            inner,
            spaces=spaces,
            default=own_default.configs,
            baselines=corners(homes),
        )

    def measure(self, group: OverlapGroup, assignment: Assignment) -> Outcome:
        """See `Backend`."""
        return self._inner.measure(group, assignment)

    def close(self) -> None:
        """See `Backend`."""
        self._inner.close()


def _home(space: ConfigSpace, config: CommConfig) -> Subspace:
    """The subspace of what the trace ran, whose channels need not be among its values."""
    way = (config.algorithm, config.protocol, config.transport)
    own = (part for part in space.subspaces if (part.algorithm, part.protocol, part.transport) == way)
    return next(own, space.subspaces[0])
