"""A process on the emulated driver alone: two steps, each a memset, told apart by marks; a kernel described by hand."""

import ctypes

cuda = ctypes.CDLL("libcuda.so.1")
context, memory = ctypes.c_void_p(), ctypes.c_uint64()


def check(result: int) -> None:
    assert result == 0, result


check(cuda.cuInit(0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))
check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 30)))
before = ctypes.c_uint64(cuda.lagom_emulation_host_ns()).value
for _ in range(3):
    cuda.lagom_emulation_mark(b'{"step":"begin"}')
    check(cuda.cuMemsetD8Async(memory, 0, ctypes.c_size_t(1 << 30), None))
check(cuda.cuCtxSynchronize())
cuda.lagom_emulation_host_ns.restype = ctypes.c_uint64
assert cuda.lagom_emulation_host_ns() > before
cuda.lagom_emulation_mark(b'{"peak_bytes":1073741824}')
check(cuda.cuCtxSynchronize())
