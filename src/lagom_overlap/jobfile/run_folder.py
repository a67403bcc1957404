"""The folder of a run: one writer and one reader for every verb.

`run.json` is in each of them and says the same of each: what was run, when, where, with which versions and seed. Its
keys are in docs/formats.md.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from lagom_overlap.errors import BundleError, JobError, OutputError, in_words
from lagom_overlap.interrupts import held_back
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.record import (
    check_new_folder,
    check_own_folder,
    create_folder,
    describe_machine,
    make_folder,
    package_versions,
    read_regular,
    utc_now,
    write_private,
)
from lagom_overlap.results.base import encoded
from lagom_overlap.results.conclusion import command_line

_log = logging.getLogger(__name__)

RUNS_FOLDER: Final = "lagom-runs"
"""Where a run is written when no folder is named, below the current one."""
RECORD: Final = "run.json"
FORMAT: Final = 1
"""Of run.json; raised when a key changes its meaning or goes, not when one is added."""
_MAX_RECORD_BYTES: Final = 1 << 25
"""A run.json of `tune` over hundreds of groups has some MB; what is larger than this is none."""

Content = bytes | Callable[[], bytes]
"""A file's bytes, or what makes them in their turn: run.json is safe before a page is drawn."""


class RunKind(StrEnum):
    """What was run: a verb, or one of its forms with a result of its own."""

    ANALYZE = "analyze"
    COMPARE = "compare"
    COMPARE_PLANNERS = "compare_planners"
    EMULATE = "emulate"
    LAYOUTS = "layouts"
    PLAN = "plan"
    REPRODUCE = "reproduce"
    RUN = "run"
    SELFTEST = "selftest"
    SIMULATE = "simulate"
    SIMULATE_CAPTURE = "simulate_capture"
    TUNE = "tune"

    @property
    def words(self) -> str:
        """The verb as it is typed, with the form of it that was run."""
        return _FORMS.get(self, str(self))


_FORMS: Final = MappingProxyType(
    {
        RunKind.COMPARE_PLANNERS: "compare (planners)",
        RunKind.LAYOUTS: "simulate (layouts)",
        RunKind.SIMULATE_CAPTURE: "simulate (capture)",
    }
)


class RunProcess(msgspec.Struct, frozen=True):
    """The process that runs, told from a later one of the same number, and from those of other machines."""

    pid: int
    started: int
    """In clock ticks since the machine was started (proc_pid_stat(5), field 22)."""
    boot: str

    @classmethod
    def this(cls) -> "RunProcess | None":
        """This one; None where the system does not tell."""
        pid, boot = os.getpid(), _boot()
        started = _started(pid)
        return None if started is None or boot is None else cls(pid=pid, started=started, boot=boot)

    @property
    def is_gone(self) -> bool:
        """Whether it has ended; False where it cannot be known: another machine's, or this one started again."""
        return _boot() == self.boot and _started(self.pid) != self.started


def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _started(pid: int) -> int | None:
    try:
        # The name before the last bracket may hold anything; a zombie has ended.
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if state in ("Z", "X") else int(fields[18])
    except (OSError, ValueError, IndexError):
        return None


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """run.json: what was run (`job`, and `request`: what the command line added), when, where, and what came of it.

    `seed` is None where nothing is drawn, `process` where the run has ended with what it says. Read from a file, `job`,
    `request`, `from_trace` and `result` are plain JSON.
    """

    format: int
    kind: RunKind
    date: str
    seed: int | None
    machine: dict[str, str]
    versions: dict[str, str]
    process: RunProcess | None = None
    request: Any = None
    from_trace: Any = None
    job: Any = None
    result: Any = None

    @classmethod
    def now(
        cls,
        kind: RunKind,
        *,
        seed: int | None,
        job: JobSpec | None = None,
        request: Mapping[str, object] | None = None,
        from_trace: msgspec.Struct | None = None,
        date: str | None = None,
        is_anonymous: bool = False,
    ) -> "RunRecord":
        """The record of a run that ends now, or ended at `date`; of an anonymous one nothing of the machine."""
        return cls(
            format=FORMAT,
            kind=kind,
            date=date or utc_now(),
            seed=seed,
            machine={} if is_anonymous else describe_machine(),
            versions=package_versions(),
            request=request,
            from_trace=from_trace,
            job=job,
        )


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that a run is written to: private to its owner, every file whole."""

    path: Path

    @staticmethod
    def check(out: Path | None) -> None:
        """Refuses early what `create` would refuse later; creates nothing.

        Raises:
            OutputError: if the folder, or `lagom-runs`, could not be created.
        """
        runs = Path(RUNS_FOLDER)
        if out is not None:
            check_new_folder(out)
        elif os.path.lexists(runs):
            check_own_folder(runs)
        else:
            check_new_folder(runs)

    @classmethod
    def create(cls, out: Path | None, name: str) -> "RunFolder":
        """The new folder `out`; without it one by name and time, numbered where another run took that name.

        Raises:
            OutputError: if it cannot be created.
        """
        if out is not None:
            create_folder(out)
            return cls(out)
        runs = Path(RUNS_FOLDER)
        if not os.path.lexists(runs):
            make_folder(runs)
        check_own_folder(runs)
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80] or "job"
        stamp = utc_now().replace(":", "").replace("-", "")
        numbers = (f"-{number}" if number > 1 else "" for number in count(1))
        folder = next(path for number in numbers if not (path := runs / f"{safe}-{stamp}{number}").exists())
        create_folder(folder)
        return cls(folder)

    def write(
        self,
        record: RunRecord,
        result: object = None,
        contents: Mapping[str, Content] = MappingProxyType({}),
        *,
        skips_unwritable: bool = False,
    ) -> tuple[Path, ...]:
        """Writes run.json, then the other files in their order; those of an earlier call are replaced one by one.

        The first Ctrl-C or SIGTERM waits until all are there. With `skips_unwritable` a file that cannot be written is
        left out with a warning. Returns the paths of what was written.

        Raises:
            OutputError: if a file cannot be written.
        """

        def run_json() -> bytes:
            return msgspec.json.format(encoded(msgspec.structs.replace(record, result=result)), indent=2) + b"\n"

        written = []
        with held_back():
            for name, content in {RECORD: run_json, **contents}.items():
                try:
                    write_private(self.path / name, content if isinstance(content, bytes) else content())
                except OutputError as error:
                    if not skips_unwritable:
                        raise
                    _log.warning("%s", error)
                else:
                    written.append(self.path / name)
        return tuple(written)

    @classmethod
    def read(cls, path: Path) -> "SavedRun":
        """A folder that `write` filled.

        Raises:
            JobError: if it is no such folder.
            BundleError: if its run.json cannot be read, is damaged or has another format.
        """
        if not path.is_dir():
            raise JobError(f"{str(path)!r} {'is no run folder' if path.exists() else 'does not exist'}")
        if not (path / RECORD).is_file():
            what = "is no regular file" if os.path.lexists(path / RECORD) else "is missing"
            raise JobError(f"{str(path)!r} is no run folder: {RECORD} {what}")
        try:
            content = read_regular(path / RECORD, _MAX_RECORD_BYTES)
            made_as = msgspec.json.decode(content, type=_Format).format
            if made_as != FORMAT:
                raise BundleError(f"run folder {str(path)!r} has format {made_as}, must have {FORMAT}")
            record = msgspec.json.decode(content, type=RunRecord)
        except OSError as error:
            raise BundleError(f"run folder {str(path)!r} cannot be read: {error.strerror}") from None
        except (UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise BundleError(f"run folder {str(path)!r} is damaged: {RECORD}: {in_words(str(error))}") from None
        files = sorted(file.name for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        return SavedRun(path=path, record=record, files=tuple(files))


class _Format(msgspec.Struct, frozen=True):
    """What is looked at first: other keys may have another meaning in another format."""

    format: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A run folder as it was read: its record, and the names of the files that are in it."""

    path: Path
    record: RunRecord
    files: tuple[str, ...]

    @property
    def kind(self) -> RunKind:
        """What was run."""
        return self.record.kind

    @property
    def has_no_process(self) -> bool:
        """Whether the process that it named is gone; what it left says whether it had ended before."""
        return self.record.process is not None and self.record.process.is_gone

    def spec(self) -> JobSpec:
        """The job that was run, checked as a job file is.

        Raises:
            BundleError: if the run had no job file, or it is damaged.
        """
        try:
            return msgspec.convert(self.record.job, JobSpec)
        except msgspec.ValidationError as error:
            raise BundleError(f"run folder {str(self.path)!r} holds no job: {in_words(str(error))}") from None


def job_command(path: Path) -> str:
    """The command of the training job whose run left `path`: its folder, or a file or folder of traces in it."""
    for folder in (path, path.parent, path.parent.parent):
        if (folder / RECORD).is_file():
            try:
                run = RunFolder.read(folder)
                return command_line(msgspec.convert(run.record.request, _Asked).command)
            except (JobError, BundleError, OSError, msgspec.ValidationError):
                break
    return command_line(())


class _Asked(msgspec.Struct, frozen=True):
    """What is read of a request: that of `lagom run` alone has a command."""

    command: tuple[str, ...] = ()


def list_runs(folder: Path) -> tuple[SavedRun, ...]:
    """Every run in a folder and in its `lagom-runs`, the latest first; what is no run folder is passed over."""
    runs = []
    for place in (folder, folder / RUNS_FOLDER):
        for path in place.iterdir() if place.is_dir() else ():
            try:
                runs.append(RunFolder.read(path))
            except (JobError, BundleError, OSError):  # a run that has not ended, something else, or not ours to read
                continue
    return tuple(sorted(runs, key=lambda run: (run.record.date, run.path.name), reverse=True))
