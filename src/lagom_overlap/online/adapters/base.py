"""What an adapter does: hand a framework's collectives to the gloo route, and take its hands off again.

Adapters never change what is computed. On NCCL none is needed: the plug-in sits below every framework. They lean on
private names of PyTorch; where one is missing, or a model does what cannot be reproduced bit by bit, the adapter
leaves the model alone from the start and says so: nothing is found out in the middle of a backward pass.
"""

import logging
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import nn

from lagom_overlap.online.routes.gloo import GlooRoute

_log = logging.getLogger(__name__)


class Adapter(Protocol):
    """One framework; `name` is what a user chooses it by."""

    name: str

    def fits(self, model: nn.Module) -> bool:
        """Whether the model uses this framework."""

    def attach(self, model: nn.Module, route: GlooRoute) -> Callable[[], None]:
        """Routes the model's collectives; returns how to undo it between two steps."""


@cache
def say_once(words: str) -> None:
    """A warning in this process's log, the first time only."""
    _log.warning("%s (torch %s)", words, torch.__version__)


def missing_names(owner: object, names: tuple[str, ...]) -> list[str]:
    """Which private names this release of PyTorch does not have."""
    return [name for name in names if not hasattr(owner, name)]
