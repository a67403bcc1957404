"""A world of ranks in one process: a fake process group, device meshes that work under fake tensors, fake streams.

One process stands for one rank. Collectives move nothing; tensors have shapes and no data. FSDP2 asks PyTorch for a
"device handle" to make its streams and events: it gets stand-ins that record who waits for whom, so that a capture on
the CPU holds the waits of the real program on a GPU.

Relies on names inside PyTorch that have no promise behind them (verified with 2.13.0); what a version lacks is passed
over, and the capture then says less.
"""

import functools
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from lagom_overlap.errors import BackendError

MAIN_STREAM: Final = "stream0"
"""The stream that computations are on unless the framework chooses another."""

_HANDLE_USERS: Final = (
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives",
    "torch.distributed.fsdp._fully_shard._fsdp_init",
    "torch.distributed.fsdp._fully_shard._fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed.tensor._random",
)
"""Modules that look a device's streams up through `_get_device_handle`."""

_MESH_METHODS: Final = (
    "__init__",
    "__getitem__",
    "_concatenate",
    "_flatten",
    "_unflatten",
    "mesh",
    "get_all_groups",
    "_get_slice_mesh_layout",
    "_create_sub_mesh",
    "_create_flatten_mesh",
    "_create_unflatten_mesh",
    "_setup_world_group_and_device",
    "_init_process_groups",
    "size",
    "get_group",
)
"""Methods of DeviceMesh that compute with small real tensors."""


class StreamSink(Protocol):
    """Who is told what streams do."""

    def record(self, stream: str, event: int) -> None:
        """`event` is recorded on `stream`."""

    def wait_event(self, stream: str, event: int) -> None:
        """`stream` waits for `event`."""

    def wait_stream(self, stream: str, other: str) -> None:
        """`stream` waits for `other`."""

    def synchronize_event(self, event: int) -> None:
        """The host waits for `event`."""

    def synchronize(self, stream: str | None) -> None:
        """The host waits for `stream`; None: for all of them."""


class FakeStreams:
    """The streams of one fake world; `current` is where operators go now."""

    def __init__(self) -> None:
        self.sink: StreamSink | None = None
        self._numbers = itertools.count()
        self._events = itertools.count()
        self._stack = [_Stream(self)]

    @property
    def current(self) -> "_Stream":
        """The innermost stream."""
        return self._stack[-1]

    def new_number(self) -> int:
        """The number of a new stream."""
        return next(self._numbers)

    def new_event(self) -> int:
        """The number of a new event."""
        return next(self._events)

    @contextmanager
    def using(self, stream: "_Stream | None") -> Iterator[None]:
        """Operators go to `stream` for a while; None changes nothing."""
        if stream is None:
            yield
            return
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()


class _Stream:
    """Stands in for torch.Stream; the attributes are those that PyTorch reads."""

    def __init__(self, world: FakeStreams) -> None:
        self._world = world
        self._entered: list[Any] = []
        number = world.new_number()
        self.name = f"stream{number}"
        self.stream_id = self.cuda_stream = number
        self.device_index, self.device_type = 0, 1
        self.device = torch.device("cuda", 0)

    def wait_stream(self, other: Any) -> None:
        if self._world.sink is not None and isinstance(other, _Stream):
            self._world.sink.wait_stream(self.name, other.name)

    def wait_event(self, event: Any) -> None:
        if self._world.sink is not None and isinstance(event, _Event):
            self._world.sink.wait_event(self.name, event.number)

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event(self._world)
        event.record(self)
        return event

    def synchronize(self) -> None:
        if self._world.sink is not None:
            self._world.sink.synchronize(self.name)

    def query(self) -> bool:
        return True

    def __enter__(self) -> "_Stream":
        context = self._world.using(self)
        context.__enter__()
        self._entered.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


class _Event:
    """Stands in for torch.Event."""

    def __init__(self, world: FakeStreams) -> None:
        self._world = world
        self.number = world.new_event()

    def record(self, stream: _Stream | None = None) -> None:
        if self._world.sink is not None:
            self._world.sink.record((stream or self._world.current).name, self.number)

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or self._world.current).wait_event(self)

    def synchronize(self) -> None:
        if self._world.sink is not None:
            self._world.sink.synchronize_event(self.number)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 0.0


class _DeviceHandle:
    """What PyTorch calls a device handle: the module of a device type, such as torch.cuda."""

    def __init__(self, world: FakeStreams) -> None:
        class Stream(_Stream):
            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(world)

        class Event(_Event):
            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__(world)

        self._world = world
        self.Stream, self.Event = Stream, Event

    def current_stream(self, *_: Any) -> _Stream:
        return self._world.current

    def stream(self, stream: _Stream | None) -> Any:
        return self._world.using(stream)

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 8

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def set_device(self, _: object) -> None:
        """One device."""

    def synchronize(self, *_: object) -> None:
        if self._world.sink is not None:
            self._world.sink.synchronize(None)

    def get_device_capability(self, *_: object) -> tuple[int, int]:
        return (9, 0)


def _replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until the stack unwinds; one that the owner lacks is passed over."""
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, value)


@contextmanager
def fake_streams() -> Iterator[FakeStreams]:
    """PyTorch's distributed code makes stand-in streams and events."""
    streams = FakeStreams()
    handle = _DeviceHandle(streams)
    with ExitStack() as stack:
        for name in _HANDLE_USERS:
            _replace(stack, import_module(name), "_get_device_handle", lambda *_: handle)
        for name in ("Stream", "Event", "current_stream", "stream", "current_device", "set_device", "synchronize"):
            _replace(stack, torch.cuda, name, getattr(handle, name))
        _replace(stack, torch, "Event", handle.Event)
        for name in ("current_stream", "synchronize"):
            _replace(stack, torch.accelerator, name, getattr(handle, name))
        yield streams


def _unfaked(raw: Any) -> Any:
    """A method, static method or property that runs outside of fake tensors."""
    function: Any = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            if isinstance(kwargs.get("_rank_map"), FakeTensor):  # init_device_mesh's: always the identity
                kwargs["_rank_map"] = torch.arange(kwargs["_rank_map"].numel(), dtype=torch.int)
            return function(*args, **kwargs)

    if isinstance(raw, property):
        return property(wrapped)
    return staticmethod(wrapped) if isinstance(raw, staticmethod) else wrapped


@contextmanager
def _meshes_of_real_tensors() -> Iterator[None]:
    """DeviceMesh computes with real tensors also under FakeTensorMode (it calls tolist and item)."""
    owners: list[tuple[type, tuple[str, ...]]] = [(torch.distributed.device_mesh.DeviceMesh, _MESH_METHODS)]
    layouts = import_module("torch.distributed._mesh_layout")
    owners += [
        (getattr(layouts, name), ("remap_to_tensor",))
        for name in ("_MeshLayout", "_FlatLayout")
        if hasattr(layouts, name)
    ]
    with ExitStack() as stack:
        for owner, names in owners:
            for name in names:
                if name in vars(owner):
                    _replace(stack, owner, name, _unfaked(vars(owner)[name]))
        yield


@contextmanager
def fake_world(num_ranks: int, rank: int = 0) -> Iterator[FakeStreams]:
    """This process is rank `rank` of `num_ranks`, for a while; nothing is left behind.

    Raises:
        BackendError: if the process has a default process group already.
    """
    if dist.is_initialized():
        raise BackendError("this process has a default process group; a capture makes its own: capture in another one")
    fake = import_module("torch.testing._internal.distributed.fake_pg")
    with fake_streams() as streams, _meshes_of_real_tensors():
        dist.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=num_ranks)
        try:
            yield streams
        finally:
            dist.destroy_process_group()
