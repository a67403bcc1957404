"""What `lagom run` does inside a Python process of the job: wait for a process group, then watch or tune.

Importing this module loads no torch. `arm` waits for the module that defines process groups to be imported by the job;
a process that never makes one (the launcher, a data loader) is never touched. Afterwards:

- FSDP2's `fully_shard` and DDP's constructor tell which model is trained (the outermost counts);
- `TrainingSteps` tells the steps apart;
- observing records; tuning hands the model to `OnlineTuner`.

Nothing here may end the job: an error of ours is one line on stderr, and the job goes on without us.
"""

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from lagom_overlap.after_import import after_import
from lagom_overlap.online.guest import safely

_log = logging.getLogger(__name__)

GROUPS_MODULE: Final = "torch.distributed.distributed_c10d"
Watch = Callable[[], None]


def arm() -> None:
    """Waits for the job to import process groups."""
    after_import(GROUPS_MODULE, _wrap_groups)


def _wrap_groups(module: ModuleType) -> None:
    """Starts after the job's own `init_process_group` has returned, and puts that back as it was."""
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:  # whatever the job passes
        result = original(*args, **kwargs)
        for holder in (module, sys.modules.get("torch.distributed")):
            if holder is not None and getattr(holder, "init_process_group", None) is init_process_group:
                holder.init_process_group = original  # type: ignore[attr-defined]  # a module of the job's torch
        safely(_begin)
        return result

    module.init_process_group = init_process_group  # type: ignore[attr-defined]  # the same


def _begin() -> None:
    """In a rank whose process group is there."""
    # Not at the top: torch is the job's, and only a rank of it pays for the rest.
    from lagom_overlap.online.launch_session import begin_session  # noqa: PLC0415

    session = begin_session(os.environ)
    atexit.register(_end, session.close, os.getpid())


def _end(close: Watch, pid: int) -> None:
    """At exit, but not of a child that the job forked: the session and its connections are its parent's."""
    if os.getpid() == pid:
        safely(close)
