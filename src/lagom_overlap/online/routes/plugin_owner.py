"""Who decides by NCCL's plug-in in this process: known to a tuner on any backend, so it loads no route."""

import weakref
from typing import Final, Protocol

from torch import distributed as dist

from lagom_overlap.errors import JobError


class _OwnedRoute(Protocol):
    """The plug-in's route, as far as its owner is concerned."""

    @property
    def is_closed(self) -> bool:
        """Whether no further table comes; a lease in force may still decide."""

    def take_over(self) -> None:
        """Begins with what an earlier route of the plug-in left."""

    def close(self) -> None:
        """Ends it."""


class PluginOwner:
    """The one route of this process that decides by the plug-in, which has one table.

    A second one is refused while the first is in use. It is not once it was released (`OnlineTuner.close`), was
    forgotten, or its process group is gone: a process that was restarted in place makes its tuner again.
    """

    def __init__(self) -> None:
        self._route: weakref.ref[_OwnedRoute] | None = None
        self._world: weakref.ref[object] | None = None
        self._was_taken = self._is_released = False

    def release(self, route: object) -> None:
        """The route's tuner was closed: the next may take its place."""
        if self._route is not None and self._route() is route:
            self._is_released = True

    def take(self, route: _OwnedRoute) -> None:
        """Makes this route the one.

        Raises:
            JobError: if another is in use.
        """
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        earlier = self._route() if self._route is not None else None
        if earlier is not None and not earlier.is_closed:
            is_same = world is not None and self._world is not None and self._world() is world
            if is_same and not self._is_released:
                raise JobError(
                    "another tuner of this process decides by NCCL's plug-in: close it before making the next"
                )
            earlier.close()
        if self._was_taken:
            route.take_over()
        self._route, self._was_taken, self._is_released = weakref.ref(route), True, False
        self._world = weakref.ref(world) if world is not None else None


PLUGIN_OWNER: Final = PluginOwner()
