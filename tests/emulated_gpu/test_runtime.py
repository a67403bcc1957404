"""The emulated runtime as a program sees it, through ctypes, in a process of its own each."""

import json

import pytest
from coordinator import Coordinator

START = """
    import ctypes as c, os
    from emulated import CudaError, Runtime, device, kernel, times
    cuda = Runtime({major})
"""


@pytest.fixture(params=[12, 13])
def on_cuda(request, on_device):
    def run(code, **environment):
        done = on_device(START.format(major=request.param) + code, **environment)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def test_memory_is_zero_then_what_was_copied_there(on_cuda):
    out = on_cuda("""
    at = cuda.malloc(10_000_000)
    assert cuda.read(at, 100_000) == bytes(100_000)
    data = os.urandom(5_000_001)
    cuda.write(at + 1_234_567, data)
    assert cuda.read(at + 1_234_567, len(data)) == data
    assert cuda.read(at + 1_234_000, 567) == bytes(567)
    other = cuda.malloc(10_000_000)
    cuda.Memset(c.c_void_p(other), 7, c.c_size_t(10_000_000))
    cuda.Memcpy(c.c_void_p(other), c.c_void_p(at), c.c_size_t(9_000_000), 3)
    assert cuda.read(other, 10_000_000) == cuda.read(at, 9_000_000) + bytes([7]) * 1_000_000
    cuda.Memset(c.c_void_p(other + 1000), 0, c.c_size_t(8_000_000))
    assert cuda.read(other + 1000, 8_000_000) == bytes(8_000_000)
    assert cuda.read(other, 1000) == cuda.read(at, 1000)
    cuda.Free(c.c_void_p(at))
    again = cuda.malloc(10_000_000)
    assert again == at and cuda.read(again, 10_000_000) == bytes(10_000_000)
    print("equal")
    """)
    assert out == "equal\n"


def test_small_blocks_that_share_a_page_are_zero_when_new(on_cuda):
    out = on_cuda("""
    blocks = [cuda.malloc(512) for _ in range(16)]
    for block in blocks:
        cuda.write(block, bytes([1]) * 512)
    cuda.Free(c.c_void_p(blocks[3]))
    assert cuda.malloc(512) == blocks[3]
    print([cuda.read(block, 512)[-1] for block in blocks[2:5]])
    """)
    assert out == "[1, 0, 1]\n"


def test_memory_ends_where_the_gpu_says_and_pages_are_taken_only_when_written(tmp_path, on_cuda):
    (tmp_path / "gpu.json").write_text(json.dumps({"name": "A40", "memory_bytes": 48_000_000_000, "num_devices": 2}))
    out = on_cuda(
        """
    first = cuda.malloc(47_000_000_000)
    try:
        cuda.malloc(2_000_000_000)
    except CudaError as error:
        print("error", error, cuda.memory())
    cuda.Memset(c.c_void_p(first), 0, c.c_size_t(47_000_000_000))
    cuda.Free(c.c_void_p(first))
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))  # getrusage counts the process before exec
    print(cuda.memory(), int(status["VmHWM"].split()[0]) < 200_000)
    """,
        LAGOM_EMULATION_GPU=str(tmp_path / "gpu.json"),
    )
    assert out.splitlines() == ["error 2 (1000000000, 48000000000)", "(48000000000, 48000000000) True"]


def test_events_time_what_lies_between_them_on_virtual_time(on_cuda):
    out = on_cuda("""
    stream, start, end = cuda.stream(), cuda.event(), cuda.event()
    cuda.EventRecord(start, stream)
    for _ in range(100):
        kernel(stream)
    cuda.EventRecord(end, stream)
    try:
        cuda.elapsed_ms(start, end)
    except CudaError as error:
        print(error)
    cuda.EventSynchronize(end)
    print(round(cuda.elapsed_ms(start, end), 4))
    """)
    # 100 kernels of 10 us; the first is issued 1 us after the first event.
    assert out == "600\n1.001\n"


def test_a_stream_waits_for_the_event_of_another(on_cuda):
    out = on_cuda("""
    first, second, event = cuda.stream(), cuda.stream(), cuda.event()
    for _ in range(5):
        before = kernel(first)
    cuda.EventRecord(event, first)
    unrelated = kernel(second)
    cuda.StreamWaitEvent(second, event, 0)
    after = kernel(second)
    cuda.DeviceSynchronize()
    gpu = device()
    print(times(gpu, after)[0] >= times(gpu, before)[1] > times(gpu, unrelated)[1])
    """)
    assert out == "True\n"


def test_the_default_stream_and_blocking_streams_follow_each_other(on_cuda):
    out = on_cuda("""
    blocking, free = cuda.stream(0), cuda.stream(1)
    a, b, d, e = kernel(blocking), kernel(None), kernel(blocking), kernel(free)
    cuda.DeviceSynchronize()
    gpu = device()
    a, b, d, e = (times(gpu, op) for op in (a, b, d, e))
    print(b[0] >= a[1], d[0] >= b[1], e[0] < b[1])
    """)
    assert out == "True True True\n"


def test_host_functions_run_in_order_before_a_wait_returns(on_cuda):
    out = on_cuda("""
    seen = []
    FUNCTION = c.CFUNCTYPE(None, c.c_void_p)
    functions = [FUNCTION(lambda _, i=i: seen.append(i)) for i in range(50)]
    stream = cuda.stream()
    for function in functions:
        kernel(stream)
        cuda.LaunchHostFunc(stream, function, None)
    cuda.StreamSynchronize(stream)
    print(seen == list(range(50)))
    """)
    assert out == "True\n"


def test_host_functions_of_a_stream_do_not_overlap_while_a_thread_waits_for_it(on_cuda):
    out = on_cuda("""
    import time
    seen = []
    FUNCTION = c.CFUNCTYPE(None, c.c_void_p)
    def call(number):
        seen.append(number)
        time.sleep(0.002)
        seen.append(number)
    functions = [FUNCTION(lambda _, i=i: call(i)) for i in range(20)]
    stream = cuda.stream()
    for function in functions:
        cuda.LaunchHostFunc(stream, function, None)
    cuda.StreamSynchronize(stream)
    print(seen == sorted([*range(20), *range(20)]))
    """)
    assert out == "True\n"


def test_a_graph_runs_at_each_launch_and_not_while_it_is_recorded(on_cuda):
    out = on_cuda("""
    stream, side, fork, join = cuda.stream(), cuda.stream(), cuda.event(), cuda.event()
    start, end = cuda.event(), cuda.event()
    at = cuda.malloc(4096)
    graph, program = c.c_void_p(), c.c_void_p()
    cuda.StreamBeginCapture(stream, 0)
    cuda.MemsetAsync(c.c_void_p(at), 5, c.c_size_t(10), stream)
    cuda.EventRecord(fork, stream)
    cuda.StreamWaitEvent(side, fork, 0)
    assert [kernel(s) for s in (side, stream, stream)] == [0, 0, 0]
    cuda.EventRecord(join, side)
    cuda.StreamWaitEvent(stream, join, 0)
    kernel(stream)
    cuda.StreamEndCapture(stream, c.byref(graph))
    cuda.GraphInstantiateWithFlags(c.byref(program), graph, c.c_ulonglong(0))
    print(cuda.read(at, 2))
    cuda.EventRecord(start, stream)
    for _ in range(3):
        cuda.GraphLaunch(program, stream)
    cuda.EventRecord(end, stream)
    cuda.StreamSynchronize(stream)
    print(cuda.read(at, 2), round(cuda.elapsed_ms(start, end), 3))
    cuda.GraphExecDestroy(program)
    cuda.GraphDestroy(graph)
    """)
    # Four steps of 10 us on the longest branch, three times, started 6 us after the first event (1 record, 5 launch).
    assert out == "b'\\x00\\x00'\nb'\\x05\\x05' 0.126\n"


def test_a_capture_that_was_not_joined_is_an_error(on_cuda):
    out = on_cuda("""
    stream, side, fork, graph = cuda.stream(), cuda.stream(), cuda.event(), c.c_void_p()
    cuda.StreamBeginCapture(stream, 0)
    kernel(stream)
    cuda.EventRecord(fork, stream)
    cuda.StreamWaitEvent(side, fork, 0)
    kernel(side)
    try:
        cuda.StreamEndCapture(stream, c.byref(graph))
    except CudaError as error:
        print(error)
    """)
    assert out == "904\n"


def test_a_stream_that_only_waits_after_its_join_leaves_nothing_unjoined(on_cuda):
    """As FSDP2's streams do at the end of a step."""
    out = on_cuda("""
    stream, side, event, graph = cuda.stream(), cuda.stream(), cuda.event(), c.c_void_p()
    cuda.StreamBeginCapture(stream, 0)
    cuda.EventRecord(event, stream)
    cuda.StreamWaitEvent(side, event, 0)
    kernel(side)
    cuda.EventRecord(event, side)
    cuda.StreamWaitEvent(stream, event, 0)
    kernel(stream)
    cuda.EventRecord(event, stream)
    cuda.StreamWaitEvent(side, event, 0)
    cuda.StreamEndCapture(stream, c.byref(graph))
    print(bool(graph))
    """)
    assert out == "True\n"


def test_collectives_are_numbered_when_they_run(tmp_path, on_device):
    with Coordinator(tmp_path / "socket") as coordinator:
        done = on_device(
            START.format(major=13)
            + """
    gpu, sequence, stream = device(), c.c_uint64(), cuda.stream()
    graph, program = c.c_void_p(), c.c_void_p()
    def collective():
        desc = gpu.describe(b'{"collective": {}}')
        assert not gpu.submit(stream, desc, b"n", None, c.byref(sequence), None)
    collective()
    cuda.StreamBeginCapture(stream, 0)
    collective()
    cuda.StreamEndCapture(stream, c.byref(graph))
    cuda.GraphInstantiateWithFlags(c.byref(program), graph, c.c_ulonglong(0))
    for _ in range(2):
        cuda.GraphLaunch(program, stream)
    collective()
    cuda.DeviceSynchronize()
    """,
            LAGOM_EMULATION_SOCKET=str(tmp_path / "socket"),
        )
    assert done.stderr == ""
    assert [op[-1] for op in coordinator.ops] == [1, 2, 3, 4]


def test_who_owes_the_contents_of_memory_is_asked_before_it_is_touched(on_cuda):
    out = on_cuda("""
    asked = []
    SETTLE = c.CFUNCTYPE(None, c.c_void_p, c.c_size_t)
    settle = SETTLE(lambda at, size: asked.append((at, size)))
    at, stream, event = cuda.malloc(1000), cuda.stream(), cuda.event()
    device().set_settle(c.cast(settle, c.c_void_p))
    cuda.MemsetAsync(c.c_void_p(at + 8), 1, c.c_size_t(100), stream)
    assert asked == [(at + 8, 100)]
    kernel(stream)
    cuda.EventRecord(event, stream)
    assert len(asked) == 1
    cuda.EventSynchronize(event)
    assert asked[1:] == [(None, 0)]
    data = c.create_string_buffer(64)
    cuda.MemcpyAsync(data, c.c_void_p(at), c.c_size_t(64), 2, stream)
    assert asked[2:4] == [(c.addressof(data), 64), (at, 64)]
    device().set_settle(None)
    print(data.raw == bytes(8) + bytes([1]) * 56)
    """)
    assert out == "True\n"


READER = """
import ctypes as c, sys
from emulated import Runtime
class Handle(c.Structure):
    _fields_ = [("bytes", c.c_char * 64)]
cuda = Runtime(13)
handle, at = Handle.from_buffer_copy(bytes.fromhex(sys.argv[1])), c.c_void_p()
cuda.IpcOpenMemHandle(c.byref(at), handle, 1)
print(cuda.read(at.value, 6))
cuda.write(at.value, b"answer")
cuda.IpcCloseMemHandle(at)
"""


def test_memory_is_shared_with_another_process(on_cuda):
    out = on_cuda(
        """
    import subprocess, sys
    at = cuda.malloc(3_000_000)
    inner = cuda.malloc(600)
    cuda.write(inner, b"shared")
    handle = c.create_string_buffer(64)
    cuda.IpcGetMemHandle(handle, c.c_void_p(inner))
    reader = [sys.executable, "-c", os.environ["READER"], handle.raw.hex()]
    print(subprocess.run(reader, capture_output=True, text=True).stdout, end="")
    print(cuda.read(inner, 6))
    """,
        READER=READER,
    )
    assert out == "b'shared'\nb'answer'\n"


def test_virtual_memory_maps_what_was_created(on_device):
    done = on_device("""
    import ctypes as c
    from emulated import Runtime
    cuda, driver = Runtime(13), c.CDLL("libcuda.so.1")
    cuda.SetDevice(0)
    class Properties(c.Structure):
        _fields_ = [(name, c.c_int) for name in ("type", "handles", "where", "id")] + [("rest", c.c_char * 16)]
    size, handle, at = 4 << 20, c.c_ulonglong(), c.c_ulonglong()
    properties = Properties(1, 1, 1, 0)
    assert not driver.cuMemCreate(c.byref(handle), c.c_size_t(size), c.byref(properties), c.c_ulonglong(0))
    zero, whole = c.c_ulonglong(0), c.c_size_t(2 * size)
    assert not driver.cuMemAddressReserve(c.byref(at), whole, c.c_size_t(0), zero, zero)
    for half in range(2):  # the same memory at two addresses
        place = c.c_ulonglong(at.value + half * size)
        assert not driver.cuMemMap(place, c.c_size_t(size), c.c_size_t(0), handle, zero)
    cuda.write(at.value, b"seen twice")
    print(cuda.read(at.value + size, 10), cuda.memory()[1] - cuda.memory()[0] == size)
    assert not driver.cuMemUnmap(at, c.c_size_t(2 * size))
    assert not driver.cuMemRelease(handle)
    print(cuda.memory()[0] == cuda.memory()[1])
    """)
    assert (done.stdout, done.stderr) == ("b'seen twice' True\nTrue\n", "")


def test_imported_memory_is_its_gpus_and_large_copies_of_untouched_memory_write_nothing(on_device):
    """What a peer exported: a copy goes over the wire, and what neither has written takes no page of either."""
    done = on_device("""
    import ctypes as c
    import os
    from emulated import Runtime
    cuda, driver = Runtime(13), c.CDLL("libcuda.so.1")
    class Properties(c.Structure):
        _fields_ = [(name, c.c_int) for name in ("type", "handles", "where", "id")] + [("rest", c.c_char * 16)]
    size, zero = 64 << 20, c.c_ulonglong(0)
    def mapped(handle):
        at = c.c_ulonglong()
        assert not driver.cuMemAddressReserve(c.byref(at), c.c_size_t(size), c.c_size_t(0), zero, zero)
        assert not driver.cuMemMap(at, c.c_size_t(size), c.c_size_t(0), handle, zero)
        return at
    cuda.SetDevice(1)
    theirs, ours, exported, device = c.c_ulonglong(), c.c_ulonglong(), c.c_int(), c.c_int()
    assert not driver.cuMemCreate(c.byref(theirs), c.c_size_t(size), c.byref(Properties(1, 1, 1, 1)), zero)
    assert not driver.cuMemExportToShareableHandle(c.byref(exported), theirs, 1, zero)
    cuda.SetDevice(0)
    assert not driver.cuMemImportFromShareableHandle(c.byref(ours), c.c_void_p(exported.value), 1)
    there, here = mapped(ours), c.c_void_p(cuda.malloc(size))
    assert not driver.cuPointerGetAttribute(c.byref(device), 9, there)
    cuda.write(there.value + (5 << 20), b"written")
    cuda.Memcpy(here, c.c_void_p(there.value), c.c_size_t(size), 3)
    pages = os.fstat(exported.value).st_blocks * 512
    print(device.value, cuda.read(here.value + (5 << 20), 7), pages <= 2 << 20)
    """)
    assert (done.stdout, done.stderr) == ("1 b'written' True\n", "")


def test_functions_are_found_by_their_base_names(on_device):
    done = on_device("""
    import ctypes as c
    driver = c.CDLL("libcuda.so.1")
    def find(name, version=13000):
        at, status = c.c_void_p(), c.c_int()
        error = driver.cuGetProcAddress_v2(name, c.byref(at), version, c.c_ulonglong(0), c.byref(status))
        return error, at.value
    def symbol(name):
        return 0, c.cast(getattr(driver, name), c.c_void_p).value
    assert find(b"cuMemAlloc") == symbol("cuMemAlloc_v2")
    assert find(b"cuInit") == symbol("cuInit")
    assert find(b"cuStreamGetCaptureInfo", 12000) == symbol("cuStreamGetCaptureInfo_v2")
    assert find(b"cuStreamGetCaptureInfo", 12030) == symbol("cuStreamGetCaptureInfo_v3")
    print(find(b"cuNothing"))
    """)
    assert (done.stdout, done.stderr) == ("(500, None)\n", "")


def test_the_visible_devices_are_those_of_the_host(tmp_path, on_cuda):
    out = on_cuda(
        """
    count, name = c.c_int(), c.create_string_buffer(20)
    cuda.GetDeviceCount(c.byref(count))
    cuda.DeviceGetPCIBusId(name, 20, 0)
    print(count.value, name.value)
    """,
        CUDA_VISIBLE_DEVICES="5,2",
    )
    assert out == "2 b'0000:60:00.0'\n"


def test_a_real_driver_is_refused_with_one_line(tmp_path, on_device, c_compiler, sources):
    """With another path for the real driver's file, since this machine has none."""
    library = tmp_path / "libcuda.so.1"
    names = (
        "client code context device driver_code driver_device driver_memory driver_share driver_stream effect framework"
    )
    files = [
        str(sources / f"{name}.c")
        for name in (names + " graph host_function memory preset stream torch_kernel transfer").split()
    ]
    c_compiler("-shared", "-fPIC", f'-DREAL_DRIVER_PATHS="{sources}/preset.c"', "-o", str(library), *files)
    done = on_device(
        'import ctypes as c\nd = c.CDLL("libcuda.so.1")\nprint(d.cuInit(0), d.cuInit(0))', LD_LIBRARY_PATH=str(tmp_path)
    )
    assert done.stdout == "803 803\n"
    assert done.stderr == "lagom emulate: this machine has a real NVIDIA driver; the emulated device is refused here\n"
