"""Frameworks that replace ranks while others keep running: a new rank counts communicators from 0, the others do not.

So no rank may decide by a table, or be tuned, once such a framework manages process groups. Importing it says nothing:
torchtitan imports torchft wherever it is installed. The class that every such job makes an object of does.
"""

import functools
import gc
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Final

from lagom_overlap.after_import import after_import

_MAKERS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "torchft.process_group": ("ProcessGroup", "torchft"),
        "nvidia_resiliency_ext.inprocess.wrap": ("Wrapper", "nvidia_resiliency_ext.inprocess"),
    }
)
"""Module -> the class whose objects replace ranks, and the name of its framework."""


class ReplacedRanks:
    """Whether this process's ranks are replaced; `watch` before the job makes what replaces them."""

    def __init__(self) -> None:
        self.by = ""
        """The framework that replaces ranks; empty if there is none."""
        self._then: list[Callable[[str], None]] = []
        self._is_watching = False

    def watch(self, then: Callable[[str], None] = lambda by: None) -> None:
        """Notices it from now on, and what there is already; `then` is told the framework, once, when it is met."""
        if self.by:
            then(self.by)
            return
        self._then.append(then)
        if not self._is_watching:
            self._is_watching = True
            for name in _MAKERS:
                after_import(name, self._wrap)

    def _wrap(self, module: ModuleType) -> None:
        class_name, framework = _MAKERS[module.__name__]
        maker: Any = getattr(module, class_name, None)
        if not isinstance(maker, type):  # another release: what cannot be watched counts as met
            self._met(framework)
            return
        if any(issubclass(type(each), maker) for each in gc.get_objects()):  # made before we came
            self._met(framework)
            return
        original: Callable[..., None] = maker.__init__  # type: ignore[misc]  # of whatever class it is

        @functools.wraps(original)
        def made(instance: Any, *args: Any, **kwargs: Any) -> None:  # whatever the job passes
            self._met(framework)
            original(instance, *args, **kwargs)

        maker.__init__ = made  # type: ignore[misc]  # as above

    def _met(self, framework: str) -> None:
        if self.by:
            return
        self.by, then, self._then = framework, self._then, []
        for each in then:
            each(framework)


REPLACED_RANKS: Final = ReplacedRanks()
