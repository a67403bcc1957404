"""Has CUPTI record events, without which a profiled wait does not say what it waited for.

PyTorch's profiler asks for CUPTI's synchronization records only. Up to CUDA 12.8 those of recorded events come with
them; since 12.9 they are a kind of their own, and each "Stream Wait Event" of the trace has `wait_on_stream` -1
(pytorch/kineto#1552, seen with PyTorch 2.15 and CUDA 13 on emulated GPUs). So we ask CUPTI for that kind ourselves,
while our own profiler runs: PyTorch reads such records when they come.
"""

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Final

_log = logging.getLogger(__name__)

CUDA_EVENT: Final = 36
"""CUPTI_ACTIVITY_KIND_CUDA_EVENT of cupti_activity.h."""
_FIRST_APART: Final = (12, 9)
_LOG_LEVEL: Final = "FLAGS_caffe2_log_level"
"""The least severe message that PyTorch's C++ writes: a variable of libc10, set by TORCH_CPP_LOG_LEVEL at start."""
_ERROR: Final = 2


def _loaded(name: str) -> Any:
    """The library that PyTorch has loaded, not another copy."""
    return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


class EventRecords:
    """CUPTI's records of events, on and off; `cuda` is PyTorch's CUDA release, None on a build without."""

    def __init__(self, cuda: str | None, load: Callable[[str], Any] = _loaded) -> None:
        self._cupti: Any = None
        self._load = load
        release = tuple(int(word) for word in (cuda or "").split(".")[:2] if word.isdecimal())
        if release < _FIRST_APART:
            return
        try:
            self._cupti = load(f"libcupti.so.{release[0]}")
        except OSError as error:
            _log.debug("waits between streams may not be told: %s", error)

    def begin(self) -> None:
        """From here on; PyTorch's profiler must run, which brings the buffers."""
        if self._cupti is not None:
            self._cupti.cuptiActivityEnable(CUDA_EVENT)

    def end(self) -> None:
        """No longer."""
        if self._cupti is not None:
            self._cupti.cuptiActivityDisable(CUDA_EVENT)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """While the profiler stops: PyTorch 2.15 warns of each such record, though it reads it, in the job's stderr."""
        try:
            level = None if self._cupti is None else ctypes.c_int.in_dll(self._load("libc10.so"), _LOG_LEVEL)
        except (OSError, ValueError):
            level = None
        if level is None:
            yield
            return
        before = level.value
        level.value = max(before, _ERROR)
        try:
            yield
        finally:
            level.value = before
