"""Calls the profiler plug-in as NCCL 2.27 (v4), 2.28 (v5), 2.29 (v6) and 2.31 (v7) on do, by NCCL's headers."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

GROUP, COLLECTIVE, P2P, CHANNEL, COLLECTIVE_CALL = 1, 2, 4, 64, 512
CHANNEL_STOP = 22
INIT_V4 = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_char_p,
    ctypes.c_uint64,
    *[ctypes.c_int] * 3,
    ctypes.c_void_p,
)
INIT_V5 = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_uint64,
    ctypes.POINTER(ctypes.c_int),
    ctypes.c_char_p,
    *[ctypes.c_int] * 3,
    ctypes.c_void_p,
)


class _Coll(ctypes.Structure):
    _fields_ = (
        ("seqNumber", ctypes.c_uint64),
        ("func", ctypes.c_char_p),
        ("sendBuff", ctypes.c_void_p),
        ("recvBuff", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("root", ctypes.c_int),
        ("datatype", ctypes.c_char_p),
        ("nChannels", ctypes.c_uint8),
        ("nWarps", ctypes.c_uint8),
        ("algo", ctypes.c_char_p),
        ("proto", ctypes.c_char_p),
        ("parentGroup", ctypes.c_void_p),
        ("kernelVariant", ctypes.c_char_p),  # v7 on
        ("isSymColl", ctypes.c_bool),
        ("userTag", ctypes.c_uint64),
    )


class _CollApi(ctypes.Structure):
    _fields_ = (
        ("func", ctypes.c_char_p),
        ("count", ctypes.c_size_t),
        ("datatype", ctypes.c_char_p),
        ("root", ctypes.c_int),
        ("stream", ctypes.c_void_p),
        ("graphCaptured", ctypes.c_bool),
    )


class _KernelCh(ctypes.Structure):
    _fields_ = (("channelId", ctypes.c_uint8), ("pTimer", ctypes.c_uint64))


class _Of(ctypes.Union):
    _fields_ = (("coll", _Coll), ("collApi", _CollApi), ("kernelCh", _KernelCh))


class _DescrV4(ctypes.Structure):
    _anonymous_ = ("of",)
    _fields_ = (("type", ctypes.c_uint8), ("parentObj", ctypes.c_void_p), ("rank", ctypes.c_int), ("of", _Of))


class _DescrV5(ctypes.Structure):
    _anonymous_ = ("of",)
    _fields_ = (("type", ctypes.c_uint64), ("parentObj", ctypes.c_void_p), ("rank", ctypes.c_int), ("of", _Of))


class _Profiler(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("init", ctypes.c_void_p),
        (
            "start",
            ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p),
        ),
        ("stop", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
        ("record", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))),
        ("finalize", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)),
    )


class PlayedComm:
    """One rank of a communicator and its profiler context."""

    def __init__(self, library: Path, version: int, comm_id: int, *, rank: int = 0, num_ranks: int = 2) -> None:
        self._plugin = _Profiler.in_dll(ctypes.CDLL(str(library), mode=os.RTLD_NOW), f"ncclProfiler_v{version}")
        self._version = version
        self._descr = _DescrV4 if version == 4 else _DescrV5
        self.context, self.mask = ctypes.c_void_p(), ctypes.c_int(-1)
        self._calls: dict[str, int] = {}
        self.num_launched = 0
        self._group: int | None = None
        context, mask = ctypes.byref(self.context), ctypes.byref(self.mask)
        if version == 4:
            status = INIT_V4(self._plugin.init)(context, mask, b"name", comm_id, 1, num_ranks, rank, None)
        else:
            status = INIT_V5(self._plugin.init)(context, comm_id, mask, b"name", 1, num_ranks, rank, None)
        assert status == 0
        assert self._plugin.name == b"lagom"

    def launch(
        self,
        func: str,
        count: int,
        datatype: str,
        channels: int,
        *,
        algo: str = "RING",
        proto: str = "SIMPLE",
        is_captured: bool = False,
        is_symmetric: bool = False,
    ) -> int | None:
        """The collective's handle. As NCCL does, without a group's handle v4 reports no collective."""
        parent = self.call(func, count, is_captured=is_captured)
        group = self._group or self._start(GROUP)
        if self._version == 4:
            if group is None:
                return None
            parent = group
        number = self._calls.get(func, 0)
        self._calls[func] = number + 1
        self.num_launched += 1
        coll = _Coll(number, func.encode(), count=count, datatype=datatype.encode(), nChannels=channels)
        coll.algo, coll.proto, coll.parentGroup = algo.encode(), proto.encode(), group if self._version >= 5 else None
        coll.isSymColl = is_symmetric if self._version >= 7 else True  # before: whatever lies there
        handle = self._start(COLLECTIVE, parent, coll=coll)
        self.stop(handle)
        if self._group is None:
            self.stop(group)
        return handle

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """What is launched inside runs in one kernel."""
        self._group = self._start(GROUP)
        yield
        self.stop(self._group)
        self._group = None

    def call(self, func: str, count: int, *, is_captured: bool = False) -> int | None:
        """What NCCL says first of a call, in the thread that makes it; from v5 on."""
        if self._version < 5:
            return None
        handle = self._start(COLLECTIVE_CALL, collApi=_CollApi(func.encode(), count, graphCaptured=is_captured))
        self.stop(handle)
        return handle

    def send(self) -> int | None:
        """A point-to-point event."""
        return self._start(P2P)

    def start_channel(self, collective: int | None, channel: int, at_ns: int) -> int | None:
        """What the proxy thread reports when a block has started."""
        return self._start(CHANNEL, collective, kernelCh=_KernelCh(channel, at_ns))

    def end_channel(self, handle: int | None, at_ns: int) -> None:
        """... and when it has ended."""
        if handle is not None:  # NCCL's own check
            assert self._plugin.record(handle, CHANNEL_STOP, ctypes.byref(ctypes.c_uint64(at_ns))) == 0
            self.stop(handle)

    def run(self, handle: int | None, times_ns: dict[int, tuple[int, int]]) -> None:
        """Starts and ends every channel."""
        started = {channel: self.start_channel(handle, channel, start) for channel, (start, _) in times_ns.items()}
        for channel, (_, end) in times_ns.items():
            self.end_channel(started[channel], end)

    def stop(self, handle: int | None) -> None:
        """NCCL stops what has a handle."""
        if handle is not None:
            assert self._plugin.stop(handle) == 0

    def finalize(self) -> None:
        """The communicator is destroyed."""
        if self.context.value is not None:
            assert self._plugin.finalize(self.context) == 0

    def _start(self, kind: int, parent: int | None = None, **of: ctypes.Structure) -> int | None:
        descr = self._descr()
        ctypes.memset(ctypes.byref(descr), 0xA5, 24)  # NCCL's v4 descriptor comes with what was on the stack
        descr.type, descr.parentObj = kind, parent
        for name, value in of.items():
            setattr(descr, name, value)
        handle = ctypes.c_void_p(0x5A5A)  # ours to set in any case
        assert self._plugin.start(self.context, ctypes.byref(handle), ctypes.byref(descr)) == 0
        return handle.value
