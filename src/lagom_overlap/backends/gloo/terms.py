"""What a backend of rank processes must know of the engine that its ranks run: names, limits, defaults."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lagom_overlap.backends.gloo.space import space_within
from lagom_overlap.collective import Collective, CommConfig, ConfigSpace, SpaceLimits
from lagom_overlap.engines.gloo_space import check_collective, check_config, whole_message


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
