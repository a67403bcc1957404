"""What may be tried on gloo for one collective, within a job's limits."""

from collections.abc import Sequence

from lagom_overlap.collective import Collective, CommConfig, ConfigSpace, SpaceLimits, Subspace
from lagom_overlap.engines.gloo_space import CHANNELS, check_config, gloo_space
from lagom_overlap.errors import SpaceError


def space_within(collective: Collective, limits: SpaceLimits) -> ConfigSpace:
    """The engine's space with the values that the job names in its place.

    Slices of at least the whole message are all the same setting: of those only the smallest is kept.

    Raises:
        SpaceError: if the limits name a knob that gloo lacks, more channels than it offers, a slice below its floor,
            no value at all, or values that do not increase.
    """
    lacking: dict[str, Sequence[object] | None] = {
        "algorithm": limits.algorithms,
        "protocol": limits.protocols,
        "transport": limits.transports,
        "num_threads": limits.num_threads,
    }
    for knob, values in lacking.items():
        if values is not None:
            words = [str(value) if isinstance(value, str) else value for value in values]  # as a job file spells them
            raise SpaceError(f"tune.space.{knob} is {words}: gloo has no such knob, leave it out")
    space_of_engine = gloo_space(collective)
    offered = space_of_engine.subspaces[0]
    num_channels = offered.num_channels if limits.num_channels is None else limits.num_channels
    slices = offered.chunk_bytes if limits.chunk_bytes is None else limits.chunk_bytes
    for channels in num_channels:
        if channels is not None and not 1 <= channels <= CHANNELS[-1]:
            raise SpaceError(f"tune.space.num_channels holds {channels}, gloo offers 1 to {CHANNELS[-1]}")
    try:
        for chunk_bytes in slices:
            check_config(CommConfig(chunk_bytes=chunk_bytes))
        space = Subspace(num_channels=num_channels, chunk_bytes=slices)  # refuses an empty or unsorted axis
    except SpaceError as error:  # its message begins with the knob
        raise SpaceError(f"tune.space.{error}") from None
    whole = [size for size in space.chunk_bytes if size is not None and size >= collective.num_bytes]
    kept = tuple(size for size in space.chunk_bytes if size not in whole[1:])
    return ConfigSpace((Subspace(num_channels=num_channels, chunk_bytes=kept),), space_of_engine.default)
