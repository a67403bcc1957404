"""The record of a run: machine, versions, files written atomically, and files of others read safely."""

import contextlib
import errno
import os
import platform
import re
import stat
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from lagom_overlap.errors import OutputError

_MARK = ".lagom-unwritten"
_HALF_WRITTEN = re.compile(r"\..+\.[a-z0-9_]{8}")
_NOT_REGULAR = "it is no regular file"
OTHERS_MAY_WRITE = 0o022
"""Mode bits that let users other than the owner write a file; the plug-in refuses a table that has one set."""
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_VERSIONED = ("lagom-overlap", "numpy", "scipy", "torch")
EMULATION_VARIABLE = "LAGOM_EMULATION_COMMAND"
"""Set by `lagom emulate` for the command that it runs: how it was called, up to its own `--`, for a shell."""


def write_private(path: Path, content: bytes) -> None:
    """Writes a file atomically, readable by its owner alone: a reader sees the old content or the new, never a part.

    Raises:
        OutputError: if it cannot be written.
    """
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
        (path.parent / _MARK).unlink(missing_ok=True)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror}") from error
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def open_regular(path: Path, *, is_own: bool = False) -> BinaryIO:
    """Opens a file that somebody else may have made; never blocks on a pipe and never reads a device.

    With `is_own` it must be ours: no link, and not another user's.

    Raises:
        OSError: if it cannot be read or is not a regular file.
    """
    follow = os.O_NOFOLLOW if is_own else 0
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | follow)
    try:
        if is_own:
            _check_own(handle, path)
        elif not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_regular(path: Path, most_bytes: int, *, is_own: bool = False) -> bytes:
    """All of a file, opened by `open_regular`; one that is too large is refused before it is read.

    Raises:
        OSError: if it cannot be read, is not a regular file, or has more than `most_bytes`.
    """
    with open_regular(path, is_own=is_own) as file:
        is_larger = os.fstat(file.fileno()).st_size > most_bytes
        content = b"" if is_larger else file.read(most_bytes + 1)
    if is_larger or len(content) > most_bytes:  # it may have grown, and some files say that they have no size
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes, the most that is allowed", str(path))
    return content


def starts_with(path: Path, *words: bytes) -> bool:
    """Whether it is a regular file that begins with one of the words; False if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(max(map(len, words))).startswith(words)
    except OSError:
        return False


def _check_own(handle: int, path: Path) -> None:
    """Refuses anything that is not this user's own file: a pipe, a device, another user's file, a hard link.

    Some file systems give everything made on them to one user (root-squashed NFS, EFS). There the folder belongs to
    that user as well, who can change the file anyway, so a file of the folder's owner is accepted.

    Raises:
        OSError: with the reason.
    """
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, _NOT_REGULAR, str(path))
    if status.st_uid != os.geteuid() and status.st_uid != path.parent.stat().st_uid:
        raise OSError(errno.EPERM, f"it belongs to user {status.st_uid}, must be user {os.geteuid()}'s", str(path))
    if status.st_nlink > 1:  # a hard link to a file of this user's that somebody wants to see damaged
        raise OSError(errno.EMLINK, f"it is one of {status.st_nlink} names of a file, must be the only one", str(path))


def create_folder(path: Path) -> None:
    """Creates a new run folder, private to its owner, or reuses one that an earlier run created and left empty.

    A mark file identifies such a folder; it is removed with the first file that is written.

    Raises:
        OutputError: if it exists already, or its parent does not exist or cannot be written.
    """
    try:
        if _is_unwritten(path):
            for leftover in path.iterdir():
                if leftover.name != _MARK:
                    leftover.unlink(missing_ok=True)
            return
    except OSError as error:
        raise OutputError(f"cannot create output folder {str(path)!r}: {error.strerror}") from None
    make_folder(path)
    try:
        (path / _MARK).touch(mode=0o600)
    except OSError as error:
        raise OutputError(f"cannot write {str(path / _MARK)!r}: {error.strerror}") from error


def make_folder(path: Path) -> None:
    """Creates a new folder, private to its owner.

    Raises:
        OutputError: as `create_folder`.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise OutputError(f"output folder {str(path)!r} exists already; name one that does not") from None
    except FileNotFoundError as error:
        reason = (
            error.strerror if path.parent.is_dir() else f"{str(path.parent)!r} does not exist"
        )  # /proc/x says so, too
        raise OutputError(f"cannot create output folder {str(path)!r}: {reason}") from None
    except OSError as error:
        raise OutputError(f"cannot create output folder {str(path)!r}: {error.strerror}") from error


def check_own_folder(path: Path) -> None:
    """Refuses an existing folder that another user made or can write to.

    Some file systems decide the owner or the mode of everything made on them. A probe file shows that, and the folder
    may then have the same owner or mode as the probe.

    Raises:
        OutputError: if it is a link, another user's, or can be written by others.
    """
    where = f"output folder {str(path)!r}"
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise OutputError(f"{where} is a symbolic link; name the folder itself, or one that does not exist")
        if not stat.S_ISDIR(status.st_mode):
            raise OutputError(f"{where} is no folder; name one that does not exist")
        is_foreign, is_open = status.st_uid != os.geteuid(), bool(status.st_mode & OTHERS_MAY_WRITE)
        if is_foreign or is_open:
            with tempfile.NamedTemporaryFile(dir=path, prefix=".lagom-") as file:  # mode 0600
                probe = os.fstat(file.fileno())
            is_foreign = is_foreign and probe.st_uid != status.st_uid
            is_open = is_open and not probe.st_mode & OTHERS_MAY_WRITE
    except OSError as error:
        raise OutputError(f"{where} cannot be used: {error.strerror}") from None
    if is_foreign:
        raise OutputError(f"{where} belongs to user {status.st_uid}, must be user {os.geteuid()}'s; name another")
    if is_open:
        mode = f"{stat.S_IMODE(status.st_mode):o}"
        raise OutputError(f"{where} can be written by others (mode {mode}), must be by its owner alone: chmod go-w")


def _is_unwritten(path: Path) -> bool:
    """Whether a run of ours created the folder and ended before it had written a file."""
    if path.is_symlink() or not (path / _MARK).is_file() or path.stat().st_uid != os.geteuid():
        return False
    return all(held.name == _MARK or _HALF_WRITTEN.fullmatch(held.name) for held in path.iterdir())


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file; a new file is readable by its owner only. If the disk is full, no part of it remains.

    Raises:
        OutputError: if it cannot be written, or is a link, a pipe, a device or another user's.
    """
    data, num_written, before = line.encode() + b"\n", 0, -1
    try:
        handle = os.open(path, _APPEND, 0o600)
        try:
            _check_own(handle, path)
            before = os.fstat(handle).st_size
            while num_written < len(data):
                num_written += os.write(handle, data[num_written:])
        except OSError:
            with contextlib.suppress(OSError):
                if os.fstat(handle).st_size == before + num_written:  # nobody else has written meanwhile
                    os.ftruncate(handle, before)
            raise
        finally:
            os.close(handle)
    except OSError as error:
        # What opening says of a link (ELOOP), and of a pipe that nobody reads (ENXIO).
        why = {errno.ELOOP: "it is a symbolic link", errno.ENXIO: _NOT_REGULAR}.get(error.errno or 0, error.strerror)
        raise OutputError(f"cannot write {str(path)!r}: {why}") from error


def check_new_folder(path: Path) -> None:
    """Refuses a folder that could not be created, without creating it.

    Raises:
        OutputError: if it exists already, its parent does not exist or cannot be written, or its name is no text.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise OutputError(f"output folder {str(path)!r} has a name that is not UTF-8 text") from None
    try:
        is_ours, is_taken = _is_unwritten(path), path.is_symlink() or path.exists()
    except OSError as error:  # a name that is too long, a parent that may not be entered
        raise OutputError(f"cannot create output folder {str(path)!r}: {error.strerror}") from None
    if is_ours:
        return
    if is_taken:
        raise OutputError(f"output folder {str(path)!r} exists already; name one that does not")
    if not path.parent.is_dir():
        lacks = "is no folder" if path.parent.exists() else "does not exist"
        raise OutputError(f"cannot create output folder {str(path)!r}: {str(path.parent)!r} {lacks}")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"cannot create output folder {str(path)!r}: {str(path.parent)!r} cannot be written")


def utc_now() -> str:
    """The date and time in UTC to the second, ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def emulated_by() -> str:
    """The `lagom emulate ... --` that this process runs under, for a shell; empty where it does not."""
    return os.environ.get(EMULATION_VARIABLE, "")


def describe_machine() -> dict[str, str]:
    """This machine: CPU, cores, load, system, and under emulation the line that emulates its GPUs; no host name."""
    load = os.getloadavg()[0]
    emulated = {"emulated_by": emulated_by()} if emulated_by() else {}
    return {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load_1min": f"{load:.1f}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **emulated,
    }


def package_versions() -> dict[str, str]:
    """The versions of Python and of the packages that influence results, without those that are not installed."""
    from importlib import metadata  # noqa: PLC0415 - not for runs that write no record

    versions = {"python": ".".join(str(part) for part in sys.version_info[:3])}
    for name in _VERSIONED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
