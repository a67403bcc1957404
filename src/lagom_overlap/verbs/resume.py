"""`lagom resume RUN`: which runs can go on from what they left, and as what.

A run of `lagom tune` can: its tuner asks the same when it is told the same, so the journal is replayed into a new
study, and measuring goes on where it ended; one that was cut off before or after all measuring begins, or writes its
files. Other verbs leave nothing to go on from, and the refusal says what to type
in their place.
"""

import fcntl
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, SavedRun
from lagom_overlap.record import describe_machine
from lagom_overlap.verbs.run_files import JOURNALS, whole_lines
from lagom_overlap.verbs.saved_runs import REPORT
from lagom_overlap.verbs.tune import AGAIN, Journaled, TuneRequest

_WHY_NOT: Final = MappingProxyType(
    {
        RunKind.RUN: "a training job goes on by its own checkpoint: lagom run --online --config RUN -- COMMAND starts "
        "from what it had saved",
        RunKind.LAYOUTS: "its ranking is simulated in one go and written at its end: type the command again",
        RunKind.COMPARE: "tuners that did not run side by side cannot be compared: type the command again",
        RunKind.SELFTEST: "NCCL may answer otherwise after a restart: type the command again",
    }
)
_PREDICTS: Final = "it writes its folder when it has ended: type the command again"
_SAME: Final = ("cpu", "cores", "system")
"""What must be the same where times that were measured go on."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keeps a run's folder to this process: two that resume one run would both write its journal.

    Raises:
        JobError: if another process resumes it. What is no folder is refused by `resumed`.
    """
    if not path.is_dir():
        yield
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        watch = f"lagom watch {shlex.quote(str(path))}"
        raise JobError(f"{str(path)!r} is being resumed by another process: {watch}") from None
    except OSError:  # a file system without locks
        return


def resumed(path: Path) -> TuneRequest:
    """The run in a folder, as a request to go on with it there.

    Raises:
        JobError: if it is no run of `lagom tune` that was cut off, still runs, or was measured on another machine.
        BundleError: if the folder is damaged.
    """
    saved = RunFolder.read(path)
    name = f"{str(path)!r} is a run of lagom {saved.kind.words}"
    if saved.kind is not RunKind.TUNE:
        why = _WHY_NOT.get(saved.kind, _PREDICTS).replace("RUN", shlex.quote(str(path)))
        raise JobError(f"{name}, which cannot be resumed: {why}")
    if saved.record.from_trace is not None:
        raise JobError(f"{name} --from-trace, which only predicts: type the command again")
    if saved.record.process is not None and not saved.has_no_process:
        raise JobError(
            f"{name} that still runs (process {saved.record.process.pid}), or ran on another machine: "
            f"lagom watch {shlex.quote(str(path))}"
        )
    result = saved.record.result
    has_ended = isinstance(result, dict) and not result.get("interrupted")
    request = _request(saved, is_whole=has_ended)
    assert request.resumes is not None
    if has_ended and (REPORT in saved.files or not request.resumes.lines):
        raise JobError(
            f"{name} that has ended; to begin a new search from it: lagom tune JOB.toml --warm-start "
            f"{shlex.quote(str(path))}"
        )
    machine = describe_machine()
    if request.backend_name not in AGAIN and any(saved.record.machine.get(key) != machine[key] for key in _SAME):
        was = ", ".join(f"{key} {saved.record.machine.get(key, 'unknown')}" for key in _SAME)
        raise JobError(f"{name} that was measured on another machine ({was}): times of the two cannot be compared")
    return request


def _request(saved: SavedRun, *, is_whole: bool) -> TuneRequest:
    asked: dict[str, Any] = saved.record.request if isinstance(saved.record.request, dict) else {}
    lines = next((lines for name in JOURNALS if (lines := whole_lines(saved.path / name))), ())
    request = TuneRequest(
        job=Job(saved.spec()),
        backend=asked.get("backend"),
        tuner=asked.get("tuner"),
        seed=saved.record.seed,
        bundle=Path(asked["bundle"]) if asked.get("bundle") else None,
        warm_start=asked.get("warm_start"),
    )
    return replace(request, resumes=Journaled(folder=saved.path, lines=lines, is_whole=is_whole))
