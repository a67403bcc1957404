"""Measure overlap groups on worker threads: a laboratory with genuine contention for the cores, without a GPU.

An instrument for comparing tuners, never a path of a product: see `lab.engine`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from lagom_overlap.backends.base import BackendRequest
from lagom_overlap.backends.gloo import EngineLimits, RankBackend, require_torch
from lagom_overlap.backends.gloo.launched import launched_num_ranks
from lagom_overlap.collective import Collective, CommConfig, ConfigSpace, Protocol, SpaceLimits, Subspace
from lagom_overlap.errors import BackendError, SpaceError
from lagom_overlap.papers.lab.space import (
    CHANNELS,
    DEFAULT,
    PROTOCOLS,
    check_collective,
    check_config,
    workers_space,
)


def space_within(collective: Collective, limits: SpaceLimits) -> ConfigSpace:
    """The engine's space with the values that the job names in its place.

    Raises:
        SpaceError: if the limits name a knob that workers lack, or a value that they do not offer.
    """
    lacking = {"algorithm": limits.algorithms, "transport": limits.transports, "num_threads": limits.num_threads}
    for knob, values in lacking.items():
        if values is not None:
            raise SpaceError(f"tune.space.{knob} is given: workers have no such knob, leave it out")
    offered = workers_space(collective).subspaces
    channels = offered[0].num_channels if limits.num_channels is None else limits.num_channels
    chunks = offered[0].chunk_bytes if limits.chunk_bytes is None else limits.chunk_bytes
    try:
        for num_channels in channels:
            check_config(CommConfig(num_channels=num_channels))
        for chunk_bytes in chunks:
            check_config(CommConfig(chunk_bytes=chunk_bytes))
        wanted = _protocols(limits.protocols)
        return ConfigSpace(
            tuple(Subspace(protocol=protocol, num_channels=channels, chunk_bytes=chunks) for protocol in wanted)
        )
    except SpaceError as error:  # its message begins with the knob
        raise SpaceError(f"tune.space.{error}") from None


def _protocols(allowed: tuple[Protocol, ...] | None) -> tuple[Protocol, ...]:
    if allowed is None:
        return PROTOCOLS
    if not allowed:
        raise SpaceError("protocol allows no value")
    return tuple(protocol for protocol in PROTOCOLS if protocol in allowed)


def _baselines(collective: Collective, space: ConfigSpace) -> Mapping[str, CommConfig]:
    """The corners of the default's way of waiting, or of the first that the job allows."""
    subspace = space.subspace_of(DEFAULT)
    return {"fixed_min": subspace.minimum, "fixed_max": subspace.maximum}


WORKERS = EngineLimits(
    name="workers",
    default=DEFAULT,
    check_collective=check_collective,
    check_config=check_config,
    space_within=space_within,
    baselines=_baselines,
)


class WorkersBackend(RankBackend):
    """The rank processes with what a report must say of this engine."""

    arm_words = MappingProxyType({"default": f"{CHANNELS[-1]} worker threads, 2 MiB chunks, yielding"})
    notes = (
        "Worker threads are an instrument for comparing tuners under genuine contention for CPU cores. They are no "
        "product path, and gains on them say nothing of a GPU.",
    )


def open_backend(request: BackendRequest) -> WorkersBackend:
    """The workers backend of a job; the entry point.

    Raises:
        MissingDependencyError: if torch is not installed.
        BackendError: if a launcher started this process, or the machine does not fit.
    """
    require_torch("workers")
    if launched_num_ranks() is not None:
        raise BackendError("the workers backend starts its own ranks on one machine; run it without a launcher")
    return WorkersBackend(request, WORKERS)
