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
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

from lagom_overlap.errors import LagomError

_log = logging.getLogger(__name__)

GROUPS_MODULE: Final = "torch.distributed.distributed_c10d"
Watch = Callable[[], None]


def arm() -> None:
    """Waits for the job to import process groups."""
    if GROUPS_MODULE in sys.modules:
        _wrap_groups(sys.modules[GROUPS_MODULE])
    else:
        sys.meta_path.insert(0, _After(GROUPS_MODULE, _wrap_groups))


class _After(MetaPathFinder):
    """Calls `then` with a module once it has been executed, and removes itself from the import system before."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec with a loader that tells us."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self._then)
        return spec


class _Telling(Loader):
    def __init__(self, loader: Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:  # what else a loader has (get_source, is_package) is the true one's
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)


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


def safely(work: Watch, *, ends_the_job: type[LagomError] | None = None) -> None:
    """Runs a part of ours; its failure is one line, and never the job's, but for errors that must end it."""
    try:
        work()
    except LagomError as error:
        if ends_the_job is not None and isinstance(error, ends_the_job):
            raise
        _complain(str(error))
    except Exception as error:
        _log.debug("lagom failed in the job", exc_info=True)
        _complain(f"{type(error).__name__}: {error}")


def _complain(text: str) -> None:
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"lagom: the job runs without us (rank {rank}): {' '.join(text.split())}\n")


def _begin() -> None:
    """In a rank whose process group is there."""
    # Not at the top: torch is the job's, and only a rank of it pays for the rest.
    from lagom_overlap.runtime.launch_session import begin_session  # noqa: PLC0415

    session = begin_session(os.environ)
    atexit.register(lambda: safely(session.close))
