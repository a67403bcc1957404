"""The store of the job's process group: under a prefix of ours, by a connection of our own, in bounded time."""

import contextlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from typing import Any, cast

from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lagom_overlap import __version__
from lagom_overlap.engines.bounded import BoundedCalls, Overdue
from lagom_overlap.export.run_variables import MODE_VARIABLE
from lagom_overlap.online.device import longest_wait_s
from lagom_overlap.online.options import DISABLE_VARIABLE, OnlineOptions, is_disabled
from lagom_overlap.online.ranks.exchange import Exchange, Store, StoreLost
from lagom_overlap.online.ranks.messages import SwitchState, WindowPlan, encode
from lagom_overlap.online.ranks.presence import RollCall, say_off
from lagom_overlap.signal_handlers import waiting

_log = logging.getLogger(__name__)


def store_of(name: str, timeout_s: float) -> Store:
    """The job's store under a prefix of ours, by a connection of its own: its waits hold nobody else up.

    Where none can be made (not every store can be cloned), or not in time, it is the job's own, which may be lost, too:
    PyTorch tries to reach a store that is gone for up to three times the store's timeout.
    """
    base: Any = _get_default_store()
    timeout_s = min(timeout_s, longest_wait_s())
    connecting = BoundedCalls("lagom-connect")
    with contextlib.suppress(RuntimeError, AttributeError, Overdue):
        base = connecting.call(base.clone, timeout_s)
        base.set_timeout(timedelta(seconds=timeout_s))
    connecting.close()
    return cast("Store", dist.PrefixStore(f"lagom/{name}", base))  # type: ignore[attr-defined]


def roll_call(num_ranks: int, timeout_s: float) -> Callable[[], str]:
    """Who takes no part, for a rank that waits; empty outside of `lagom run`, whose ranks alone say they are here."""
    mode = os.environ.get(MODE_VARIABLE)
    return str if mode is None else RollCall(partial(store_of, "here", timeout_s), num_ranks, mode, __version__).trouble


def tell_others(say: Callable[[Store, int, str, str], None]) -> None:
    """By the job's store, for whoever asks why a rank does not come; a job whose store is lost has other worries.

    Only ranks of `lagom run` ask. A store that does not answer, or whose connection a wait of ours still holds, is not
    waited for: this may be called because of that.
    """
    if (mode := os.environ.get(MODE_VARIABLE)) is None:
        return
    if is_disabled():
        mode = f"off ({DISABLE_VARIABLE} is set)"
    try:
        store = dist.PrefixStore("lagom/here", _get_default_store())  # type: ignore[attr-defined]  # as above
        _by_the_jobs_store(partial(say, cast("Store", store), dist.get_rank(), mode, __version__))
    except Exception as error:
        _log.debug("the others do not hear whether this rank is here: %s", error)


def refuse_others(exchange: Exchange, name: str, why: str) -> None:
    """Tells the other ranks not to wait for this one."""
    words = f"rank {exchange.rank}: it {why}"
    windows = (0, 1)  # the first plan may be out already
    try:
        for window in windows:
            exchange.veto(window, words)
    except StoreLost as error:
        if isinstance(error.__cause__, Overdue):
            return  # the job's own connection need not answer either, and one wait more is one too many
        # Without a thread or a connection of ours the job's own connection does: it has no wait of ours before it.
        with contextlib.suppress(Exception):
            store = dist.PrefixStore(f"lagom/{name}", _get_default_store())  # type: ignore[attr-defined]  # as above
            for window in windows:
                plan = WindowPlan(window=window, state=SwitchState.OFF, reason=words)
                _by_the_jobs_store(partial(store.compare_set, f"plan/{window}", "", encode(plan)))
    finally:
        exchange.close()
    tell_others(partial(say_off, why=why))


def _by_the_jobs_store(word: Callable[[], object]) -> None:
    """Says something by the job's own connection, in a thread where one can be had: without, none of ours waits there.

    Raises:
        Exception: the store's, or that it did not answer in time.
    """
    telling = BoundedCalls("lagom-tell")
    try:
        said = telling.start(word)
    except RuntimeError:
        word()
    else:
        waiting(lambda: wait([said], min(OnlineOptions().timeout_s, longest_wait_s())))
        said.result(0)
    finally:
        telling.close()
