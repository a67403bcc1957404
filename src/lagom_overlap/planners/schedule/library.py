"""liblagom_list_schedule.so, spoken to through ctypes; its calls leave the interpreter to other threads."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.nccl_plugin.library import load_library
from lagom_overlap.planners.schedule.graph import Schedule, TaskGraph

LIBRARY_NAME: Final = "liblagom_list_schedule.so"
VERSION: Final = 2
"""LLS_VERSION of csrc: a library of another version is refused."""


class _Graph(ctypes.Structure):
    _fields_ = (
        ("num_tasks", ctypes.c_int64),
        ("num_resources", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("ticks", "resource", "pred_begin", "preds", "succ_begin", "succs")),
    )


@cache
def library() -> ctypes.CDLL:
    """The library, its functions declared.

    Raises:
        MissingDependencyError: if it is not built, or of another version.
    """
    loaded = load_library(LIBRARY_NAME, "lls", VERSION, ctypes.CDLL)
    pointer, integer, double, graph = ctypes.c_void_p, ctypes.c_int, ctypes.c_double, ctypes.POINTER(_Graph)
    long, short = ctypes.c_int64, ctypes.c_int32
    loaded.lls_generate.argtypes = [graph, integer, pointer, pointer]
    loaded.lls_improve.argtypes = [graph, integer, integer, integer, integer, long, double, pointer, pointer]
    loaded.lls_sweep.argtypes = [graph, short, short, integer, ctypes.c_uint64, double, *([pointer] * 4)]
    loaded.lls_two_chains.argtypes = [*(long, pointer, pointer), *(long, pointer, pointer), long, pointer]
    for function in (loaded.lls_generate, loaded.lls_improve, loaded.lls_sweep, loaded.lls_two_chains):
        function.restype = long
    return loaded


def _lists(arcs: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Where each task's list begins, and the lists one after the other."""
    begin = np.zeros(len(arcs) + 1, np.int32)
    np.cumsum([len(tasks) for tasks in arcs], out=begin[1:])
    return begin, np.fromiter((task for tasks in arcs for task in tasks), np.int32, int(begin[-1]))


class GraphArrays:
    """A graph as the library takes it: along its arcs, and against them. Any number of threads may use it at once."""

    def __init__(self, graph: TaskGraph) -> None:
        self.ticks = np.asarray(graph.ticks, np.int64)
        resource = np.asarray(graph.resource, np.int32)
        preds, succs = _lists(graph.preds), _lists(graph.succs)
        self._kept = (resource, *preds, *succs)  # the structures only point to them
        num = (len(graph), len(graph.resources), self.ticks.ctypes.data, resource.ctypes.data)
        ahead, back = ([array.ctypes.data for array in arrays] for arrays in (preds, succs))
        self.forward = _Graph(*num, *ahead, *back)
        self.backward = _Graph(*num, *back, *ahead)


def schedule_of(makespan: int, starts: NDArray[np.int64]) -> Schedule:
    """What a function of the library returned, as a schedule.

    Raises:
        MemoryError: if it refused.
    """
    if makespan < 0:
        raise MemoryError(f"{LIBRARY_NAME}: error {-makespan}")
    return Schedule(tuple(starts.tolist()), makespan)
