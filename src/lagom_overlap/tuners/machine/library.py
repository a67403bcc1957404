"""liblagom_search.so, spoken to through ctypes: structures as in `csrc/lagom_search.h`, numpy arrays as addresses."""

import ctypes
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from lagom_overlap.nccl_plugin.library import load_library

LIBRARY_NAME: Final = "liblagom_search.so"
VERSION: Final = 3
"""LS_VERSION of csrc: a library of another version is refused."""

_INT, _REAL, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class LatticeStruct(ctypes.Structure):
    """`struct ls_lattice`."""

    _fields_ = (
        ("num_places", _INT),
        *((name, _POINTER) for name in ("channels", "chunk_bytes", "kind", "near", "steps")),
    )


class GroupStruct(ctypes.Structure):
    """`struct ls_group`."""

    _fields_ = (
        *(
            (name, _INT)
            for name in (
                "num_comms",
                "num_lattices",
                "most_places",
                "num_kernels",
                "most_channels",
                "knows_grid",
                "num_kinds",
            )
        ),
        *((name, _POINTER) for name in ("lattices", "lattice_of", "wire_bytes", "fluid", "whole", "intensity")),
        *((name, _REAL) for name in ("curve_sd", "collective_sd", "spot_sd", "body_sd", "step_sd")),
    )


class RecordStruct(ctypes.Structure):
    """`struct ls_record`."""

    _fields_ = (
        ("num_runs", _INT),
        *((name, _POINTER) for name in ("places", "comm_s", "comp_s", "num")),
        ("sigma", _REAL),
        *((name, _POINTER) for name in ("num_seen", "seen", "index", "precision", "factor")),
    )


class SurrogateStruct(ctypes.Structure):
    """`struct ls_surrogate`."""

    _fields_ = tuple(
        (name, _POINTER) for name in ("use", "pace", "comm_s", "under", "alone", "rest", "fronts", "num_front")
    )


_ARGUMENTS: Final = {
    "ls_fit_wire": "ppppippp",
    "ls_prepare": "pp",
    "ls_wires": "pppp",
    "ls_fit_body": "ppppippippp",
    "ls_computations": "ppipp",
    "ls_times": "pppipp",
    "ls_best": "ppppirpp",
    "ls_waiting": "pipppiiip",
}
"""Of each function: p pointer, i whole number, r real number."""
_LETTERS: Final = np.dtype(np.float64).char + np.dtype(np.int64).char + np.dtype(np.intp).char + np.dtype(np.uint8).char


@cache
def _library() -> ctypes.CDLL:
    library = load_library(LIBRARY_NAME, "ls", VERSION, ctypes.CDLL)
    for name, letters in _ARGUMENTS.items():
        getattr(library, name).argtypes = [{"p": _POINTER, "i": _INT, "r": _REAL}[letter] for letter in letters]
    return library


def call(name: str, *arguments: Any) -> None:
    """Runs a function of the library.

    Raises:
        MissingDependencyError: if the library is not built, or of another version.
        MemoryError: if memory is wanting.
    """
    if getattr(_library(), name)(*arguments):
        raise MemoryError(f"{LIBRARY_NAME}: {name} got no memory")


def address(array: npt.NDArray[Any]) -> int:
    """Where the numbers of an array begin, row by row without gaps; the caller keeps it alive."""
    assert array.dtype.char in _LETTERS, f"an array of {array.dtype}"
    # A quarter of the time of `array.ctypes.data`, and arrays with gaps are refused.
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data)) if array.size else 0
