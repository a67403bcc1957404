"""What `lagom run` does inside a Python process of the job: wait for a process group, then watch or tune.

Importing this module loads no torch. `arm` waits for the module that defines process groups to be imported by the job;
a process that never makes one (the launcher, a data loader) is never touched. Afterwards:

- FSDP2's `fully_shard` and DDP's constructor tell which model is trained (the outermost counts);
- `TrainingSteps` tells the steps apart;
- observing records; tuning hands the model to `OnlineTuner`.

Nothing here may end the job: an error of ours is one line on stderr, and the job goes on without us. The one exception:
a rank that cannot know whether the others decide by the table (`agreed_table`), whose collectives could hang.
"""

import atexit
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from lagom_overlap.after_import import after_import
from lagom_overlap.errors import BackendError
from lagom_overlap.online.guest import safely
from lagom_overlap.online.replaced_ranks import REPLACED_RANKS
from lagom_overlap.stderr import write_lines

_log = logging.getLogger(__name__)

GROUPS_MODULE: Final = "torch.distributed.distributed_c10d"
Watch = Callable[[], None]


def arm() -> None:
    """Waits for the job to import process groups, and, where a table decides, to make what would replace ranks."""
    after_import(GROUPS_MODULE, _wrap)
    if _has_table():
        REPLACED_RANKS.watch(lambda framework: safely(lambda: _refuse_table(framework)))


def _has_table() -> bool:
    return bool(os.environ.get("LAGOM_TABLE") and os.environ.get("NCCL_TUNER_PLUGIN"))


def _refuse_table(replaced_by: str) -> None:
    """Every rank makes it at the same place of the job's calls: all of them decide nothing from then on."""
    # Not at the top, here and below: every Python process of the job imports this module, few get as far.
    from lagom_overlap.nccl_plugin.library import TunerPlugin  # noqa: PLC0415
    from lagom_overlap.online.events import rank_of  # noqa: PLC0415

    TunerPlugin(Path(os.environ["NCCL_TUNER_PLUGIN"])).enable(is_enabled=False)
    if rank_of(os.environ) == 0:
        write_lines(
            f"lagom: --config is not applied: {replaced_by} replaces ranks while the others run on, and a rank that "
            "joins would know communicators by other places than those: its collectives would hang"
        )


def _wrap(module: ModuleType) -> None:
    _wrap_groups(module)
    _wrap_destroy(module)


def _wrap_groups(module: ModuleType) -> None:
    """Starts after the job's own `init_process_group` has returned, and puts that back as it was.

    Where a table decides it stays: a process that destroys its groups and makes them anew counts from 0, as one does
    that was just started in the place of another.
    """
    original = module.init_process_group
    has_begun = False

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:  # whatever the job passes
        nonlocal has_begun
        if has_begun:
            is_again = not module.is_initialized()
            if is_again:
                safely(_restart)
            result = original(*args, **kwargs)
            if is_again:
                safely(_begin, ends_the_job=BackendError)
            return result
        has_files = _settled(original, args, kwargs)
        result = original(*args, **kwargs)
        has_begun = True
        if _has_table():
            safely(_begin, ends_the_job=BackendError)
            return result
        for holder in (module, sys.modules.get("torch.distributed")):
            if holder is not None and getattr(holder, "init_process_group", None) is init_process_group:
                holder.init_process_group = original  # type: ignore[attr-defined]  # a module of the job's torch
        if has_files:
            safely(_begin)
        return result

    module.init_process_group = init_process_group  # type: ignore[attr-defined]  # the same


def _wrap_destroy(module: ModuleType) -> None:
    """What a session has open for the process groups is closed behind them: a job may go on without, or make others."""
    original = module.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> Any:
        are_all = group is None or group is module.GroupMember.WORLD
        result = original(group)
        while are_all and _releases:
            safely(_releases.pop())
        return result

    module.destroy_process_group = destroy_process_group  # type: ignore[attr-defined]  # the same


def _settled(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this process knows its rank and its files, which NCCL may make within the call that follows."""
    handled = []

    def settle_here() -> None:
        from lagom_overlap.online.run_jobs import meeting_of, settle  # noqa: PLC0415

        settle(meeting_of(inspect.signature(original).bind_partial(*args, **kwargs).arguments, os.environ))
        handled.append(True)

    safely(settle_here)
    return bool(handled)


_sessions: list[Watch] = []
"""What ends the session of this process; it is one, or none."""
_releases: list[Watch] = []
"""What ends its part in the job's process groups."""


def _restart() -> None:
    """The session ends with the process groups, as they do in a process that is replaced; another one follows."""
    atexit.unregister(_end)
    while _sessions:
        safely(_sessions.pop())
    _releases.clear()
    from lagom_overlap.nccl_plugin.library import TunerPlugin  # noqa: PLC0415

    TunerPlugin(Path(os.environ["NCCL_TUNER_PLUGIN"])).restart()


def _begin() -> None:
    """In a rank whose process group is there."""
    # Not at the top: torch is the job's, and only a rank of it pays for the rest.
    from lagom_overlap.online.job_store import tell_others  # noqa: PLC0415
    from lagom_overlap.online.launch_session import begin_session, note_job  # noqa: PLC0415
    from lagom_overlap.online.ranks.presence import say_here, say_off  # noqa: PLC0415

    note_job(os.environ)
    tell_others(say_here)  # first, because the session may wait for them
    try:
        session = begin_session(os.environ)
    except BaseException as error:
        tell_others(partial(say_off, why=str(error)))
        raise
    _sessions.append(session.close)
    _releases.append(session.release)
    atexit.register(_end, session.close, os.getpid())


def _end(close: Watch, pid: int) -> None:
    """At exit, but not of a child that the job forked: the session and its connections are its parent's."""
    if os.getpid() == pid:
        safely(close)
