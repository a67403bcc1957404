"""The event simulation with contention: `csrc/lagom_simulation.c`, called through ctypes.

Operators of a graph run concurrently. Between two events the same set runs, so the duration of each operator is
constant while it does; `set_times` is asked once per set of kinds (collectives, kinds from 0 up, before computations,
below 0, each in order) and the answer is cached. Operators with the same end time end together; what waited for them
starts then. Groups, iterations and streams are views: they define the waits, the kind of each operator, and the times
of a set of kinds.

The call keeps the interpreter's lock: simulations share tables between threads, and one takes microseconds.
"""

import ctypes
import weakref
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

from lagom_overlap.nccl_plugin.library import load_library

LIBRARY_NAME: Final = "liblagom_simulation.so"
VERSION: Final = 2
"""Of csrc's `lsim_version`: a library of another version is refused."""

SetTimes = Callable[[tuple[int, ...]], Sequence[float]]
"""The duration (s) of each operator while exactly this set runs; by kind, in the order given."""


class _Graph(ctypes.Structure):
    _fields_ = (("num_ops", ctypes.c_int64), *((name, ctypes.c_void_p) for name in ("waits", "begin", "followers")))


class _Holds(ctypes.Structure):
    _fields_ = (("num_comms", ctypes.c_int64), ("num_comps", ctypes.c_int64), ("behind", ctypes.c_void_p))


@cache
def library() -> ctypes.PyDLL:
    """The library, its functions declared.

    Raises:
        MissingDependencyError: if it is not built, or of another version.
    """
    lib = load_library(LIBRARY_NAME, "lsim", VERSION, ctypes.PyDLL)
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    lib.lsim_rates_open.restype = pointer
    lib.lsim_rates_close.argtypes, lib.lsim_rates_close.restype = [pointer], None
    lib.lsim_rates_add.argtypes, lib.lsim_rates_add.restype = [pointer, ctypes.c_int32, pointer, pointer], long
    lib.lsim_followers.argtypes, lib.lsim_followers.restype = [long, *[pointer] * 4], None
    lib.lsim_run.argtypes, lib.lsim_run.restype = [pointer] * 8, long
    lib.lsim_forget.argtypes, lib.lsim_forget.restype = [pointer], None
    return lib


class Holds:
    """Which collectives wait behind the computation that runs when they start, by kinds.

    `behind` gives, per kind of collective and of computation, the share of the computation that is left when the
    collective gets its SMs: once where the computation has not begun, once where it runs; 1 where it waits for nothing.
    """

    def __init__(self, num_comps: int) -> None:
        self.num_comps = num_comps
        self._behind = array("d")
        self._holds = _Holds(0, num_comps, None)

    def add_comm(self, behind: Sequence[tuple[float, float]]) -> None:
        """The shares of the next kind of collective, per kind of computation."""
        assert len(behind) == self.num_comps
        self._behind.extend([share for pair in behind for share in pair])
        self._holds = _Holds(self._holds.num_comms + 1, self.num_comps, self._behind.buffer_info()[0])

    @property
    def address(self) -> int:
        """Where the library finds them."""
        return ctypes.addressof(self._holds)


class EventGraph:
    """The waits between operators, and the times of the sets that have run so far.

    Args:
        waits: the operators that each one waits for, by number; or flat, how many each waits for and how far from it
            each of them is. They need not be distinct from one another.
        set_times: asked once per set of kinds.
    """

    def __init__(self, waits: Sequence[Sequence[int]] | tuple["array[int]", "array[int]"], set_times: SetTimes) -> None:
        numbers, distances = waits if isinstance(waits, tuple) else _flat(waits)
        self._set_times = set_times
        begin, followers = array("i", bytes(4 * len(numbers) + 4)), array("i", bytes(4 * len(distances)))
        self._arrays = (numbers, begin, followers)
        addresses = [one.buffer_info()[0] for one in (numbers, distances, begin, followers)]
        self._library = library()
        self._library.lsim_followers(len(numbers), *addresses)
        self._graph = _Graph(len(numbers), *(one.buffer_info()[0] for one in self._arrays))
        self._rates = self._library.lsim_rates_open()
        if not self._rates:
            raise MemoryError(LIBRARY_NAME)
        weakref.finalize(self, self._library.lsim_rates_close, self._rates)
        self._address = ctypes.addressof(self._graph)
        self._zeros = bytes(8 * len(numbers))

    def run(self, kinds: "array[int]", holds: Holds | None = None) -> tuple["array[float]", "array[float]"]:
        """Start and end (s) of every operator of these kinds (`array("i")`)."""
        starts, ends = array("d", self._zeros), array("d", self._zeros)
        missing = array("i", self._zeros[: 4 * len(kinds)])
        addresses = [one.buffer_info()[0] for one in (kinds, starts, ends, missing)]
        holds_address, stopped = None if holds is None else holds.address, ctypes.c_void_p()
        kept = ctypes.byref(stopped)
        try:
            while left := self._library.lsim_run(self._address, self._rates, holds_address, *addresses, kept):
                if left < 0:
                    raise MemoryError(f"{LIBRARY_NAME}: error {-left}")
                self._add(tuple(missing[:left]))
        finally:
            self._library.lsim_forget(stopped)
        return starts, ends

    def _add(self, kinds: tuple[int, ...]) -> None:
        times = array("d", self._set_times(kinds))
        assert len(times) == len(kinds)
        address = array("i", kinds)
        error = self._library.lsim_rates_add(self._rates, len(kinds), address.buffer_info()[0], times.buffer_info()[0])
        if error:
            raise MemoryError(f"{LIBRARY_NAME}: error {-error}")


def _flat(waits: Sequence[Sequence[int]]) -> tuple["array[int]", "array[int]"]:
    distances = [other - number for number, earlier in enumerate(waits) for other in earlier]
    return array("i", map(len, waits)), array("i", distances)
