"""What an adapter does: hand a framework's collectives to the gloo route, and take its hands off again.

Adapters never change what is computed. On NCCL none is needed: the plug-in sits below every framework.
"""

from collections.abc import Callable
from typing import Protocol

from torch import nn

from lagom_overlap.runtime.gloo_route import GlooRoute


class Adapter(Protocol):
    """One framework; `name` is what a user chooses it by."""

    name: str

    def fits(self, model: nn.Module) -> bool:
        """Whether the model uses this framework."""

    def attach(self, model: nn.Module, route: GlooRoute) -> Callable[[], None]:
        """Routes the model's collectives; returns how to undo it between two steps."""
