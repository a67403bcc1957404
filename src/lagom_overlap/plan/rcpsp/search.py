"""The genetic search over schedules, in liblagom_rcpsp.so; calls release the interpreter lock while they run.

What it does is said in csrc/lagom_rcpsp.c. Departures from the literature that it names: a steady population instead of
generations, where a child replaces the longest schedule unless it is longer itself or its list is known already; and
populations of thousands, several of which grow stale apart before their best meet: there is time for millions of
schedules, and what ran out first was variety.
"""

import ctypes
import errno
from collections.abc import Sequence
from functools import cache
from math import gcd
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lagom_overlap.errors import BackendError, JobError
from lagom_overlap.plan.rcpsp.project import Project
from lagom_overlap.plugin.library import installed_library

LIBRARY_NAME: Final = "liblagom_rcpsp.so"
VERSION: Final = 1
MAX_ACTIVITIES: Final = 1 << 15
MAX_RESOURCES: Final = 64
MAX_ARCS: Final = 1 << 22
MAX_HORIZON: Final = 1 << 22
MAX_CAPACITY: Final = (1 << 62) - 1
"""The library's limits: what it refuses is refused here in words."""
_POPULATIONS: Final = (8, 1 << 14)
_MEMORY_BYTES: Final = 1 << 26
"""Of the lists of a population."""
_FOREVER: Final = 1 << 62


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(installed_library(LIBRARY_NAME)))
    version = library.lr_version()
    if version != VERSION:
        raise BackendError(f"{LIBRARY_NAME} is version {version}, this package needs {VERSION}: install it again")
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.lr_open.restype = pointer
    library.lr_open.argtypes = [
        *(integer, integer, pointer, pointer, pointer, integer, pointer, ctypes.c_uint64, integer),
        ctypes.POINTER(integer),
    ]
    library.lr_close.argtypes = [pointer]
    library.lr_close.restype = None
    library.lr_run.argtypes = [pointer, ctypes.c_double, ctypes.c_int64, integer]
    library.lr_best.argtypes = library.lr_add.argtypes = [pointer, pointer]
    library.lr_place.argtypes = [pointer, integer, pointer, pointer]
    library.lr_justify.argtypes = [pointer, pointer, pointer]
    return library


class GeneticSearch:
    """The search on a project, continued by `run`; one thread at a time.

    Raises:
        JobError: if the project is too large for it.
        MissingDependencyError: if the library is not built.
        BackendError: if it is of another version, or memory is short.
    """

    def __init__(self, project: Project, *, seed: int = 0, population: int = 1024) -> None:
        _check_limits(project)
        self._num = len(project)
        self._unit = gcd(*project.durations) or 1
        demands = np.array(project.demands, np.int64).reshape(self._num, -1)
        capacities = np.array(project.capacities, np.int64)
        durations = np.array([duration // self._unit for duration in project.durations], np.int32)
        arcs = [(pred, succ) for succ, preds in enumerate(project.preds) for pred in preds]
        ends = np.array(arcs, np.int32).reshape(-1, 2)
        least, most = _POPULATIONS
        self._search = None
        self._library = _library()
        error = ctypes.c_int()
        self._search = self._library.lr_open(
            *(self._num, len(project.capacities), durations.ctypes.data),
            *(demands.ctypes.data, capacities.ctypes.data, len(arcs), ends.ctypes.data, seed % (1 << 64)),
            *(max(least, min(population, most, _MEMORY_BYTES // (4 * self._num))), ctypes.byref(error)),
        )
        if not self._search:
            assert error.value == errno.ENOMEM, f"{LIBRARY_NAME} refused what was checked: error {error.value}"
            raise BackendError(f"no memory for the search of project {project.name!r}")

    def __del__(self) -> None:
        search, self._search = getattr(self, "_search", None), None
        if search:
            self._library.lr_close(search)

    def run(self, *, limit_s: float, target: int = 0, max_children: int = _FOREVER) -> int:
        """Searches for so long, for so many schedules or until a makespan of `target`; the shortest makespan so far.

        What is found depends on the seed, the population, and the children of all calls together.
        """
        return self._unit * int(self._library.lr_run(self._search, limit_s, max_children, target // self._unit))

    def best(self) -> tuple[int, list[int]]:
        """The makespan and the starts of the shortest schedule so far.

        Raises:
            ValueError: if there is none, because nothing was searched.
        """
        starts = np.empty(self._num, np.int32)
        makespan = self._library.lr_best(self._search, starts.ctypes.data)
        if makespan < 0:
            raise ValueError("nothing was searched yet")
        return self._unit * int(makespan), self._in_periods(starts)

    def add(self, starts: ArrayLike) -> None:
        """Takes a schedule from elsewhere, justified, into the population.

        Raises:
            ValueError: if it breaks precedence.
        """
        rounded = self._row(np.asarray(starts, np.int64) // self._unit)
        if self._library.lr_add(self._search, rounded.ctypes.data):
            raise ValueError("the starts break precedence, or one is negative or late")

    def placed(self, order: Sequence[int], *, is_backward: bool = False) -> list[int]:
        """Starts if activities are placed in this order, each as early as what is placed allows.

        Backward: in a reversed topological order, with time running backward.

        Raises:
            ValueError: if the order is not topological.
        """
        starts, row = np.empty(self._num, np.int32), self._row(order)
        return self._made(
            self._library.lr_place(self._search, int(is_backward), row.ctypes.data, starts.ctypes.data), starts
        )

    def justified(self, order: Sequence[int]) -> list[int]:
        """The same, then shifted right and left for as long as it gets shorter."""
        starts, row = np.empty(self._num, np.int32), self._row(order)
        return self._made(self._library.lr_justify(self._search, row.ctypes.data, starts.ctypes.data), starts)

    def _row(self, numbers: ArrayLike) -> NDArray[np.int32]:
        row = np.ascontiguousarray(numbers, np.int32)
        if row.shape != (self._num,):
            raise ValueError(f"{row.shape} numbers, {self._num} are needed")
        return row

    def _made(self, makespan: int, starts: NDArray[np.int32]) -> list[int]:
        if makespan < 0:
            raise ValueError("the order is not topological")
        return self._in_periods(starts)

    def _in_periods(self, starts: NDArray[np.int32]) -> list[int]:
        return [self._unit * start for start in starts.tolist()]


def _check_limits(project: Project) -> None:
    for what, number, most in (
        ("activities", len(project), MAX_ACTIVITIES),
        ("resources", len(project.capacities), MAX_RESOURCES),
        ("arcs", sum(map(len, project.preds)), MAX_ARCS),
        ("periods in all activities", sum(project.durations) // (gcd(*project.durations) or 1), MAX_HORIZON),
        ("units of a resource", max(project.capacities, default=0), MAX_CAPACITY),
    ):
        if number > most:
            raise JobError(f"project {project.name!r} has {number} {what}, at most {most} are searched")
