"""Both sides of a group in one value: the collectives' configurations, and how the computation is launched.

An assignment is a tuple of `CommConfig`, one per collective. A plain tuple leaves the computation untouched, which is
what the published tuners give. `LaunchedAssignment` is such a tuple that also sets the computation's side: whoever
deals with collectives only reads it like any other, whoever runs a group asks `launch_of`. It equals another only if
both sides do, so that measurements under different launches are never taken for one another.

Careful: what derives another tuple from it (a slice, `(*head, config)`) is back at the untouched computation;
`launched(derived, launch_of(assignment))` keeps it.
"""

from collections.abc import Iterable

from lagom_overlap.collective.config import CommConfig
from lagom_overlap.collective.launch import UNTOUCHED_LAUNCH, LaunchConfig


class LaunchedAssignment(tuple[CommConfig, ...]):
    """An assignment whose computation is not launched as untouched; made by `launched` only."""

    _launch: LaunchConfig

    def __new__(cls, configs: Iterable[CommConfig], launch: LaunchConfig) -> "LaunchedAssignment":
        """Both sides.

        Raises:
            ValueError: if the launch is untouched: that is a plain tuple, or equal values would differ.
        """
        if launch.is_untouched:
            raise ValueError("an untouched launch is a plain tuple of configurations")
        made = super().__new__(cls, configs)
        made._launch = launch
        return made

    @property
    def launch(self) -> LaunchConfig:
        """The computation's side."""
        return self._launch

    def __getnewargs__(self) -> tuple[tuple[CommConfig, ...], LaunchConfig]:
        return tuple(self), self._launch

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LaunchedAssignment):
            return False if isinstance(other, tuple) else NotImplemented
        return self._launch == other._launch and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple.__hash__(self), self._launch))

    def __repr__(self) -> str:
        return f"LaunchedAssignment({tuple(self)!r}, {self._launch!r})"


def launched(configs: Iterable[CommConfig], launch: LaunchConfig) -> tuple[CommConfig, ...]:
    """The configurations with that launch in place of any they had; a plain tuple where it is untouched."""
    return tuple(configs) if launch.is_untouched else LaunchedAssignment(configs, launch)


def launch_of(assignment: tuple[CommConfig, ...]) -> LaunchConfig:
    """How an assignment launches the computation."""
    return assignment.launch if isinstance(assignment, LaunchedAssignment) else UNTOUCHED_LAUNCH
