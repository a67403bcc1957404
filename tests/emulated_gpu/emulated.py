"""The emulated libraries through ctypes, for code that runs in a process of its own."""

import ctypes as c


class Op(c.Structure):
    _fields_ = [
        ("device", c.c_uint32),
        ("stream", c.c_uint32),
        ("desc_id", c.c_uint32),
        ("priority", c.c_int32),
        ("after_op", c.c_uint64),
        ("instance", c.c_uint64),
    ]


class Device(c.Structure):
    """`emulated_gpu` of device.h."""

    _fields_ = [
        ("version", c.c_uint32),
        ("bytes", c.c_uint32),
        ("describe", c.CFUNCTYPE(c.c_uint32, c.c_char_p)),
        ("submit_op", c.CFUNCTYPE(c.c_uint64, c.POINTER(Op), c.c_uint64)),
        ("wait", c.CFUNCTYPE(c.c_int, c.c_uint64)),
        ("wait_in_background", c.CFUNCTYPE(c.c_int, c.c_uint64)),
        ("query", c.CFUNCTYPE(c.c_int, c.c_uint64)),
        ("times", c.CFUNCTYPE(c.c_bool, c.c_uint64, c.POINTER(c.c_uint64), c.POINTER(c.c_uint64))),
        ("host_ns", c.CFUNCTYPE(c.c_uint64)),
        ("advance", c.CFUNCTYPE(None, c.c_uint64)),
        (
            "submit",
            c.CFUNCTYPE(
                *(c.c_int, c.c_void_p, c.c_uint32, c.c_char_p),
                *(c.c_void_p, c.POINTER(c.c_uint64), c.POINTER(c.c_uint64)),
            ),
        ),
        *((name, c.c_void_p) for name in ("launch", "preset", "refusal", "physical_device", "bus", "has_nvlink")),
        ("set_settle", c.CFUNCTYPE(None, c.c_void_p)),
    ]


def device() -> Device:
    return Device.in_dll(c.CDLL("libcuda.so.1"), "lagom_emulated_gpu")


def times(gpu: Device, op_id: int) -> tuple[int, int] | None:
    start, end = c.c_uint64(), c.c_uint64()
    return (start.value, end.value) if gpu.times(op_id, c.byref(start), c.byref(end)) else None


class CudaError(Exception):
    """What a call returned."""


class Runtime:
    """The CUDA runtime: a call that fails raises its number."""

    def __init__(self, major: int) -> None:
        self._library = c.CDLL(f"libcudart.so.{major}")

    def __getattr__(self, name: str):
        function = getattr(self._library, "cuda" + name)

        def call(*arguments: object) -> None:
            if error := function(*arguments):
                raise CudaError(error)

        return call

    def malloc(self, num_bytes: int) -> int:
        at = c.c_void_p()
        self.Malloc(c.byref(at), c.c_size_t(num_bytes))
        return at.value

    def stream(self, flags: int = 1) -> c.c_void_p:
        stream = c.c_void_p()
        self.StreamCreateWithFlags(c.byref(stream), flags)
        return stream

    def event(self) -> c.c_void_p:
        event = c.c_void_p()
        self.EventCreate(c.byref(event))
        return event

    def elapsed_ms(self, start: c.c_void_p, end: c.c_void_p) -> float:
        ms = c.c_float()
        self.EventElapsedTime(c.byref(ms), start, end)
        return ms.value

    def write(self, at: int, data: bytes, stream: object = None) -> None:
        self.MemcpyAsync(c.c_void_p(at), data, c.c_size_t(len(data)), 1, stream)

    def read(self, at: int, num_bytes: int) -> bytes:
        data = c.create_string_buffer(num_bytes)
        self.Memcpy(data, c.c_void_p(at), c.c_size_t(num_bytes), 2)
        return data.raw

    def memory(self) -> tuple[int, int]:
        free, total = c.c_size_t(), c.c_size_t()
        self.MemGetInfo(c.byref(free), c.byref(total))
        return free.value, total.value


def kernel(stream: object, name: bytes = b"k", shape: tuple[int, int] | None = None) -> int:
    """Launches a kernel that is only timed, of so many blocks and threads; its operation, 0 while a graph records."""
    gpu, op_id = device(), c.c_uint64()
    launch = (c.c_uint * 2)(*shape) if shape else None
    error = gpu.submit(stream, gpu.describe(b'{"kernel": "%s"}' % name), name, launch, None, c.byref(op_id))
    if error:
        raise CudaError(error)
    return op_id.value
