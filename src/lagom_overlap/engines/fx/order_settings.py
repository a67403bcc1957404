"""Settings of Inductor that move collectives after our pass, each of which undoes the order of a plan.

`reorder_for_peak_memory` is on by default; so is `aten_distributed_optimizations.enable_simple_overlap` in PyTorch
2.15, which moves starts up and waits down at the very end of the scheduler (pytorch#184235, #184240). A release that
lacks a setting does not have what it does.
"""

from collections.abc import Iterator
from typing import Any, Final

_SETTINGS: Final = ("reorder_for_peak_memory", "aten_distributed_optimizations.enable_simple_overlap")


def undoing(config: Any) -> tuple[str, ...]:
    """The settings that are on; `config` is `torch._inductor.config`."""
    return tuple(name for name, owner, attribute in _present(config) if getattr(owner, attribute))


def keep_order(config: Any) -> None:
    """Switches them off."""
    for _, owner, attribute in _present(config):
        setattr(owner, attribute, False)


def _present(config: Any) -> Iterator[tuple[str, Any, str]]:
    for name in _SETTINGS:
        *path, attribute = name.split(".")
        owner = config
        for part in path:
            owner = getattr(owner, part, None)
        if hasattr(owner, attribute):
            yield name, owner, attribute
