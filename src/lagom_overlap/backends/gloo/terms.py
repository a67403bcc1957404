"""What a backend of rank processes needs from the engine that its ranks run: name, limits, search space, defaults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lagom_overlap.collective import Collective, CommConfig, ConfigSpace, SpaceLimits, Subspace
from lagom_overlap.engines.gloo_space import CHANNELS, check_collective, check_config, gloo_space, whole_message
from lagom_overlap.errors import SpaceError


def space_within(collective: Collective, limits: SpaceLimits) -> ConfigSpace:
    """What may be tried on gloo for one collective: the engine's space, narrowed to the values that the job names.

    All slices of at least the whole message are the same setting; only the smallest of them is kept.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """`name` as the rank process knows the engine; `default` what a call runs with that nobody tunes.

    `check_collective` raises BackendError for what cannot run, `check_config` SpaceError for what cannot be set,
    `space_within` SpaceError for limits that the engine cannot keep. `baselines` are more settings of one collective.
    """

    name: str
    default: CommConfig
    check_collective: Callable[[Collective], None]
    check_config: Callable[[CommConfig], None]
    space_within: Callable[[Collective, SpaceLimits], ConfigSpace]
    baselines: Callable[[Collective, ConfigSpace], Mapping[str, CommConfig]]


def _baselines(collective: Collective, space: ConfigSpace) -> Mapping[str, CommConfig]:
    """The engine without tuning (each message as one slice on one channel), and the two corners of the space."""
    return {
        "engine_default": whole_message(collective),
        "fixed_min": space.subspaces[0].minimum,
        "fixed_max": space.subspaces[0].maximum,
    }


GLOO = EngineLimits(
    name="gloo",
    default=CommConfig(),
    check_collective=check_collective,
    check_config=check_config,
    space_within=space_within,
    baselines=_baselines,
)
"""torch's gloo; the default is the native PyTorch call."""
