"""A backend over a model that was fitted to a trace: what the trace ran is the default, nothing is run.

Not an entry point: it needs the groups and the fit (`lagom tune --from-trace`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lagom_overlap.backends.base import Assignment, BackendRequest, GroupProblem, Outcome
from lagom_overlap.backends.simulated import SimulatedBackend
from lagom_overlap.collective import CommConfig, ConfigSpace, Subspace
from lagom_overlap.cost import ContentionModel
from lagom_overlap.workload import OverlapGroup


@dataclass(frozen=True, slots=True)
class TracedDefault:
    """What the trace ran for each collective of a group, and which of them any knob reaches."""

    configs: Assignment
    tunable: tuple[bool, ...]

    def __post_init__(self) -> None:
        if len(self.configs) != len(self.tunable):
            raise ValueError(f"{len(self.configs)} configurations for {len(self.tunable)} collectives")


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


class TracedBackend:
    """Implements `Backend`: the simulator, with the trace's own settings as the default of every group."""

    def __init__(self, model: ContentionModel, request: BackendRequest, defaults: Mapping[str, TracedDefault]) -> None:
        self._inner = SimulatedBackend(model, request)
        self._defaults = dict(defaults)
        gpu = model.cluster.gpu.name
        self.description = f"predicted from a trace: the contention model on {gpu}, fitted to it; nothing was run"

    def problem(self, group: OverlapGroup) -> GroupProblem:
        """See `Backend`."""
        inner, held = self._inner.problem(group), self._defaults[group.name]
        return replace(
            inner,
            spaces=tuple(
                space if free else only(config)
                for space, free, config in zip(inner.spaces, held.tunable, held.configs, strict=True)
            ),
            default=held.configs,
            baselines={
                name: tuple(
                    other if free else config
                    for other, free, config in zip(assignment, held.tunable, held.configs, strict=True)
                )
                for name, assignment in inner.baselines.items()
            },
        )

    def measure(self, group: OverlapGroup, assignment: Assignment) -> Outcome:
        """See `Backend`."""
        return self._inner.measure(group, assignment)

    def close(self) -> None:
        """See `Backend`."""
        self._inner.close()
