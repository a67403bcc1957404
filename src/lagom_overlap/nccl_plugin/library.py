"""The plug-in as a training process reaches it: the same shared object that NCCL has loaded, found by its path.

Opening a library twice by one path gives one instance, so what is called here is what NCCL decides by.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import lagom_overlap
from lagom_overlap.errors import MissingDependencyError, TableError

LIBRARY_NAME: Final = "liblagom_tuner.so"
_Library = TypeVar("_Library", bound=ctypes.CDLL)


def installed_library(name: str = LIBRARY_NAME) -> Path:
    """Where the wheel put a shared object of ours; of the plug-in it is the value for `NCCL_TUNER_PLUGIN`.

    Raises:
        MissingDependencyError: if this installation has none (a source tree that was not built).
    """
    for folder in lagom_overlap.__path__:  # an editable install keeps what is built apart from the sources
        path = Path(folder) / "lib" / name
        if path.is_file():
            return path
    raise MissingDependencyError(f"{name} is not built; run: pip install lagom-overlap")


def load_library(name: str, prefix: str, version: int, loader: type[_Library]) -> _Library:
    """A shared object of ours, opened; its functions' names begin with `prefix`.

    Raises:
        MissingDependencyError: if it is not built, or of another version.
    """
    library = loader(str(installed_library(name)))
    actual = getattr(library, f"{prefix}_version")()
    if actual != version:
        raise MissingDependencyError(f"{name} is version {actual}, this package needs {version}: install it again")
    return library


@dataclass(frozen=True, slots=True)
class CommunicatorCalls:
    """How many calls of 1 MiB and more were made, or asked about, on a communicator; `comm_id` is this run's."""

    comm_id: int
    num_ranks: int
    num_calls: int


class TunerPlugin:
    """Steps, swaps and the switches of the plug-in in this process. No call of it waits on a collective."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._step = library.lagom_step
        self._step.restype = ctypes.c_uint32
        self._swap = library.lagom_swap
        self._swap.argtypes = [ctypes.c_uint64]
        self._install = library.lagom_install
        self._install.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]
        self._prepare = library.lagom_prepare
        self._prepare.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]
        self._commit = library.lagom_commit
        self._commit.argtypes = [ctypes.c_uint64]
        self._take_back = library.lagom_take_back
        self._take_back.argtypes = [ctypes.c_uint64]
        self._generation = library.lagom_generation
        self._generation.restype = ctypes.c_uint64
        self._enable = library.lagom_enable
        self._enable.restype = None
        self._bind = library.lagom_bind
        self._bind.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32]
        self._counts = library.lagom_counts
        self._counts.argtypes = [ctypes.POINTER(ctypes.c_uint64)] * 2
        self._counts.restype = None
        self._calls = library.lagom_calls
        self._calls.argtypes = [*[ctypes.POINTER(ctypes.c_uint64)] * 3, ctypes.c_size_t]
        self._calls.restype = ctypes.c_size_t
        self._num_large = library.lagom_num_large
        self._num_large.restype = ctypes.c_uint64
        self._restart = library.lagom_restart
        self._restart.restype = None
        self._capture = library.lagom_capture
        self._capture.restype = ctypes.c_uint64
        self._flush_record = library.lagom_record_flush
        self._flush_record.restype = None
        self._flush_profile = library.lagom_profile_flush
        self._flush_profile.restype = None
        self._profile_enable = library.lagom_profile_enable
        self._error_text = library.lagom_error_text
        self._error_text.restype = ctypes.c_char_p

    def step(self) -> int:
        """Marks a step boundary in the record. Returns the number of the step that begins."""
        return int(self._step())

    def swap(self, generation: int = 0) -> None:
        """Puts the table file in force, if it has this generation (0: any).

        Every rank must call it between the same two steps, after all agreed: collectives whose ranks decide by
        different tables hang.

        Raises:
            TableError: if the file is refused; the previous table stays in force.
        """
        self._check(self._swap(generation))

    def install(self, data: bytes, generation: int = 0) -> None:
        """The same as `swap`, from memory."""
        self._check(self._install(data, len(data), generation))

    def prepare(self, data: bytes, generation: int) -> None:
        """Does everything of an `install` that can fail, and changes nothing; drops what was not committed before.

        Raises:
            TableError: if the table is refused.
        """
        self._check(self._prepare(data, len(data), generation))

    def commit(self, generation: int) -> None:
        """Puts the table that was prepared under this generation in force from the next call on.

        Raises:
            TableError: if none was prepared, or another one since.
        """
        self._check(self._commit(generation))

    def take_back(self, generation: int) -> None:
        """Undoes the commit of this generation, before the next `prepare`; nothing to do where it is not in force.

        Raises:
            TableError: if what was in force before is gone.
        """
        self._check(self._take_back(generation))

    @property
    def generation(self) -> int:
        """The generation of the table in force; 0: none, or switched off."""
        return int(self._generation())

    def enable(self, *, is_enabled: bool) -> None:
        """Switches decisions off and on; what a chained tuner answers stays. At the same step on every rank."""
        self._enable(int(is_enabled))

    def begin_capture(self) -> None:
        """From here on a CUDA graph is captured: only calls that are known to be outside of it are decided."""
        self._capture(1)

    def end_capture(self) -> int:
        """The graph is captured. Returns how many calls were not known to be outside of it."""
        return int(self._capture(0))

    def profile(self, *, is_enabled: bool) -> int:
        """Switches the profiler plug-in on or off from the next call; returns how many communicators it serves.

        It is notified of calls in any case, because `begin_capture` needs that. What a CUDA graph has captured stays
        as it was. Ranks need not agree.
        """
        return int(self._profile_enable(int(is_enabled)))

    def counts(self) -> tuple[int, int]:
        """The calls that NCCL asked about on communicators of several ranks, and those that the table had a row for."""
        num_asked, num_matched = ctypes.c_uint64(), ctypes.c_uint64()
        self._counts(ctypes.byref(num_asked), ctypes.byref(num_matched))
        return num_asked.value, num_matched.value

    def calls(self) -> tuple[CommunicatorCalls, ...]:
        """What was called so far on each communicator of this process; may be asked by any thread."""
        room = 64
        while True:
            columns = [(ctypes.c_uint64 * room)() for _ in range(3)]
            num = int(self._calls(*columns, room))
            if num <= room:
                return tuple(CommunicatorCalls(*(int(each[i]) for each in columns)) for i in range(num))
            room = num

    def flush_record(self) -> None:
        """Writes pending entries to the record's file; to be called before it is read."""
        self._flush_record()

    def flush_profile(self) -> None:
        """The same for the profile."""
        self._flush_profile()

    def num_large(self) -> int:
        """How many of those calls had 1 MiB and more."""
        return int(self._num_large())

    def restart(self) -> None:
        """Restarts the counts of communicators and steps: the job destroyed its process groups and makes new ones."""
        self._restart()

    def bind(self, comm_id: int, *, num_nodes: int | None, creation_order: int) -> bool:
        """Says which communicator of the table NCCL's `comm_id` is; False if there is no such communicator."""
        return int(self._bind(comm_id, num_nodes or 0, creation_order)) > 0

    def _check(self, error: int) -> None:
        if error:
            raise TableError(f"the plug-in refused the table: it {self._error_text(error).decode()}")
