"""Calls the profiler plug-in as NCCL 2.27 (v4), 2.28 (v5), 2.29 (v6) and 2.31 (v7) on do, by NCCL's headers."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

GROUP, COLLECTIVE, P2P, PROXY_OP, PROXY_STEP, CHANNEL, COLLECTIVE_CALL = 1, 2, 4, 8, 16, 64, 512
SEND_GPU_WAIT, SEND_WAIT, RECV_WAIT, RECV_FLUSH_WAIT, RECV_GPU_WAIT = range(8, 13)
IN_PROGRESS, SEND_PEER_WAIT, CHANNEL_STOP = 19, 20, 22
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


class _ProxyOp(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_int),
        ("channelId", ctypes.c_uint8),
        ("peer", ctypes.c_int),
        ("nSteps", ctypes.c_int),
        ("chunkSize", ctypes.c_int),
        ("isSend", ctypes.c_int),
    )


class _ProxyStep(ctypes.Structure):
    _fields_ = (("step", ctypes.c_int),)


class _Of(ctypes.Union):
    _fields_ = (
        ("coll", _Coll),
        ("collApi", _CollApi),
        ("kernelCh", _KernelCh),
        ("proxyOp", _ProxyOp),
        ("proxyStep", _ProxyStep),
    )


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
        self.num_launched += 1
        number = self._calls.get(func, 0)
        self._calls[func] = number + 1
        coll = _Coll(number, func.encode(), count=count, datatype=datatype.encode(), nChannels=channels)
        coll.algo, coll.proto, coll.parentGroup = algo.encode(), proto.encode(), group if self._version >= 5 else None
        coll.isSymColl = is_symmetric if self._version >= 7 else True  # before: whatever lies there
        handle = self._start(COLLECTIVE, parent, coll=coll)
        self.stop(handle)
        if self._group is None:
            self.stop(group)
        return handle

    def replay(self, parent: int | None, func: str, count: int, datatype: str, channels: int) -> int | None:
        """A CUDA graph is replayed: its host callback tells of the collective again, of the captured call."""
        number = self._calls.get(func, 0)
        self._calls[func] = number + 1
        group = self._start(GROUP)
        coll = _Coll(number, func.encode(), count=count, datatype=datatype.encode(), nChannels=channels)
        coll.algo, coll.proto, coll.parentGroup = b"RING", b"SIMPLE", group
        handle = self._start(COLLECTIVE, parent, coll=coll)
        self.stop(handle)
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

    def start_op(
        self, collective: int | None, channel: int, *, is_send: bool, pid: int | None = None, context: int | None = None
    ) -> int | None:
        """A channel's sends to, or receipts from, one peer are queued; of another process (PXN) with its `context`."""
        op = _ProxyOp(os.getpid() if pid is None else pid, channel, 1, 1, 1 << 19, is_send)
        return self._start(PROXY_OP, collective, context=context, proxyOp=op)

    def state(self, handle: int | None, state: int, num_bytes: int = 0) -> None:
        """NCCL tells of what has a handle."""
        if handle is not None:
            assert self._plugin.record(handle, state, ctypes.byref(ctypes.c_uint64(num_bytes))) == 0

    def start_step(self, op: int | None, step: int, *, context: int | None = None) -> int | None:
        """A transfer is posted."""
        return self._start(PROXY_STEP, op, context=context, proxyStep=_ProxyStep(step))

    def move(self, op: int | None, sizes: list[int], *, is_send: bool) -> None:
        """What `net.cc` tells of an operation from its first progress to the end of its last transfer."""
        self.state(op, IN_PROGRESS)
        for step, size in enumerate(sizes):
            before = sizes[step - 1] if step else 0  # the size that NCCL holds is of the transfer before
            handle = self.start_step(op, step)
            if is_send:
                self.state(handle, SEND_GPU_WAIT, before)
                for _ in range(3):  # once for each poll until the network takes it
                    self.state(handle, SEND_PEER_WAIT, before)
                self.state(handle, SEND_WAIT, size)
            else:
                handle = self.start_step(op, step)  # the network did not take it at first: started again
                self.state(handle, RECV_WAIT, before)
                self.state(handle, RECV_FLUSH_WAIT, size)
                self.state(handle, RECV_GPU_WAIT, size)
            self.stop(handle)
        self.stop(op)

    def stop(self, handle: int | None) -> None:
        """NCCL stops what has a handle."""
        if handle is not None:
            assert self._plugin.stop(handle) == 0

    def finalize(self) -> None:
        """The communicator is destroyed."""
        if self.context.value is not None:
            assert self._plugin.finalize(self.context) == 0

    def _start(
        self, kind: int, parent: int | None = None, *, context: int | None = None, **of: ctypes.Structure
    ) -> int | None:
        descr = self._descr()
        ctypes.memset(ctypes.byref(descr), 0xA5, 24)  # NCCL's v4 descriptor comes with what was on the stack
        descr.type, descr.parentObj = kind, parent
        for name, value in of.items():
            setattr(descr, name, value)
        handle = ctypes.c_void_p(0x5A5A)  # ours to set in any case
        told = self.context if context is None else ctypes.c_void_p(context)
        assert self._plugin.start(told, ctypes.byref(handle), ctypes.byref(descr)) == 0
        return handle.value
