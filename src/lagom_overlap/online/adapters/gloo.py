"""The route of a job on gloo, with the adapters that bring its framework's collectives there."""

import contextlib
import logging
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final, cast

from torch import nn

from lagom_overlap.online.adapters.base import Adapter
from lagom_overlap.online.adapters.calls import CallsAdapter
from lagom_overlap.online.adapters.ddp import DdpAdapter
from lagom_overlap.online.adapters.fsdp2 import Fsdp2Adapter
from lagom_overlap.online.ranks.exchange import Store
from lagom_overlap.online.routes.gloo import GlooRoute

_log = logging.getLogger(__name__)

ADAPTERS: Final = MappingProxyType(
    {adapter.name: adapter for adapter in cast("list[Adapter]", [Fsdp2Adapter(), DdpAdapter(), CallsAdapter()])}
)


def open_gloo_route(model: nn.Module, store: Store, timeout_s: float, adapters: Sequence[str] | None) -> GlooRoute:
    """The route, and on the model what `adapters` names; None: what fits it."""
    route = GlooRoute(store, meeting_timeout_s=timeout_s)  # type: ignore[arg-type]  # the same store, by its class
    chosen = [a for name, a in ADAPTERS.items() if (a.fits(model) if adapters is None else name in adapters)]
    with contextlib.ExitStack() as undo:
        undo.callback(route.close)
        for adapter in chosen:
            route.on_close(adapter.attach(model, route))
        undo.pop_all()
    if not chosen:
        _log.warning(
            "no adapter fits %s: nothing will be tuned; allowed: %s", type(model).__name__, ", ".join(ADAPTERS)
        )
    return route
