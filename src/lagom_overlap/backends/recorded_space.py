"""What a job's limits leave of a recorded space: a replay can try less than was recorded, never more."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lagom_overlap.collective import NO_LAUNCHES, ConfigSpace, LaunchSpace, SpaceLimits, Subspace
from lagom_overlap.collective.space import RESOURCE_KNOBS
from lagom_overlap.errors import SpaceError

_FIELD_OF: Final = {
    "algorithm": "algorithms",
    "protocol": "protocols",
    "transport": "transports",
    **{knob: knob for knob in RESOURCE_KNOBS},
}
"""Knob, which is also the key below `tune.space` -> field of `SpaceLimits`."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """The values that the job allows for one knob."""

    knob: str
    values: tuple[object, ...]

    def __str__(self) -> str:
        return f"tune.space.{self.knob} is {shown(self.values)}"

    def within(self, subspace: Subspace) -> Subspace | None:
        """What the limit leaves of a subspace; all of it where the collective lacks the knob, None if nothing."""
        held = _held(subspace, self.knob)
        if held == (None,):
            return subspace
        kept = tuple(value for value in held if value in self.values)
        if not kept:
            return None
        change: dict[str, Any] = {self.knob: kept} if self.knob in RESOURCE_KNOBS else {}
        return replace(subspace, **change)


def shown(values: Iterable[object]) -> list[object]:
    """Values as a job file spells them: the words of enums, not their names in our code."""
    return [str(value) if isinstance(value, str) else value for value in values]


def check_recorded(limits: SpaceLimits, recorded: Iterable[ConfigSpace], recorded_limits: SpaceLimits | None) -> None:
    """Refuses a value that no collective of the recording was offered.

    A value among the recorded job's own limits (`recorded_limits`) passes: its backend may have left it out where it
    could not be set, and the same job must be free to ask for it again.

    Raises:
        SpaceError: naming the key, the value and what was recorded.
    """
    subspaces = [subspace for space in recorded for subspace in space.subspaces]
    for limit in _limits(limits):
        offered = dict.fromkeys(value for subspace in subspaces for value in _held(subspace, limit.knob))
        known = set(offered) | set(_asked(recorded_limits, limit.knob) or ())
        for value in limit.values:
            if value not in known:
                words = shown(held for held in offered if held is not None)
                has = f"holds {words}" if words else "holds no such knob"
                raise SpaceError(f"tune.space.{limit.knob} holds {shown([value])[0]!r}, but the recording {has}")


def within_limits(space: ConfigSpace, limits: SpaceLimits, what: str) -> ConfigSpace:
    """The part of a recorded space that the job allows; `what` names the collective in an error.

    Raises:
        SpaceError: if nothing is left, naming the key that leaves nothing.
    """
    left: tuple[Subspace, ...] = space.subspaces
    asked = _limits(limits)
    for number, limit in enumerate(asked, start=1):
        kept = tuple(cut for subspace in left if (cut := limit.within(subspace)) is not None)
        if not kept:
            held = shown(dict.fromkeys(value for subspace in left for value in _held(subspace, limit.knob)))
            suffix = f" under {', '.join(map(str, asked[: number - 1]))}" if number > 1 else ""
            raise SpaceError(f"{limit}, but the recording of {what} holds {held}{suffix}: nothing is left to try")
        left = kept
    return ConfigSpace(left)


def launches_within(recorded: LaunchSpace, wanted: LaunchSpace | None) -> LaunchSpace:
    """The part of the recorded computation's side that the job asks for; nothing where it does not ask.

    Raises:
        SpaceError: if it asks for a value that was not recorded.
    """
    if wanted is None:
        return NO_LAUNCHES
    for key, field in (("sm_carveout", "sm_carveouts"), ("launch_order", "orders"), ("stream_priority", "priorities")):
        held = getattr(recorded, field)
        for value in getattr(wanted, field):
            if value not in held:
                has = f"holds {shown(held)}" if held else "holds no such knob"
                raise SpaceError(f"tune.space.{key} holds {shown([value])[0]!r}, but the recording {has}")
    return wanted


def _limits(limits: SpaceLimits) -> list[_Limit]:
    asked = ((knob, _asked(limits, knob)) for knob in _FIELD_OF)
    return [_Limit(knob, tuple(values)) for knob, values in asked if values is not None]


def _asked(limits: SpaceLimits | None, knob: str) -> Sequence[object] | None:
    values: Sequence[object] | None = None if limits is None else getattr(limits, _FIELD_OF[knob])
    return values


def _held(subspace: Subspace, knob: str) -> tuple[object, ...]:
    value = getattr(subspace, knob)
    return value if knob in RESOURCE_KNOBS else (value,)
