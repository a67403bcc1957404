"""CUPTI's records and NVML's answers, read as PyTorch's profiler and NCCL read them."""

import json

import pytest

RECORD = """
    import ctypes as c, struct
    from emulated import Runtime, device, kernel
    cuda, cupti = Runtime({major}), c.CDLL("libcupti.so.{major}")
    got = []
    store = c.create_string_buffer(1 << 16)
    REQUEST = c.CFUNCTYPE(None, c.POINTER(c.c_void_p), c.POINTER(c.c_size_t), c.POINTER(c.c_size_t))
    COMPLETE = c.CFUNCTYPE(None, c.c_void_p, c.c_uint32, c.c_void_p, c.c_size_t, c.c_size_t)
    def request(at, size, count):
        at[0], size[0] = c.addressof(store), 1 << 16
    def complete(context, stream, at, size, valid):
        record = c.c_void_p()
        while not cupti.cuptiActivityGetNextRecord(c.c_void_p(at), c.c_size_t(valid), c.byref(record)):
            got.append((c.c_uint32.from_address(record.value).value, c.string_at(record.value, 224)))
    request, complete = REQUEST(request), COMPLETE(complete)
    cupti.cuptiActivityRegisterCallbacks(request, complete)
    for kind in {kinds}:
        cupti.cuptiActivityEnable(kind)
    stream, event, at = cuda.stream(), cuda.event(), cuda.malloc(4096)
    cupti.cuptiActivityPushExternalCorrelationId(3, c.c_uint64(77))
    kernel(stream, b"first")
    cupti.cuptiActivityPopExternalCorrelationId(3, None)
    kernel(stream, b"second", (24, 544))
    cuda.MemsetAsync(c.c_void_p(at), 1, c.c_size_t(4096), stream)
    cuda.write(at, bytes(64), stream)
    cuda.EventRecord(event, stream)
    cuda.DeviceSynchronize()
    cupti.cuptiActivityFlushAll(1)
    def times(record):
        return struct.unpack_from("<QQ", record, 16)
    kernels = [record for kind, record in got if kind == 10]
    copies = [record for kind, record in got if kind in (1, 2)]
    print([kind for kind, _ in got])
    print([c.c_char_p(struct.unpack_from("<Q", record, 104)[0]).value for record in kernels])
    print([end - start for start, end in map(times, kernels + copies)])
    print(times(kernels[1])[0] - times(kernels[0])[1])
    print([struct.unpack_from("<6i", record, 52) for record in kernels])
    outer = [struct.unpack_from("<IQI", record, 4) for kind, record in got if kind == 39]
    print(outer == [(3, 77, struct.unpack_from("<I", kernels[0], 92)[0])])
"""


@pytest.mark.parametrize(
    ("major", "enabled", "has_event"),
    [(12, (1, 2, 5, 10, 38, 39), True), (13, (1, 2, 5, 10, 38, 39), False), (13, (1, 2, 5, 10, 36, 38, 39), True)],
)
def test_operations_are_recorded_with_virtual_times_and_what_called_them(on_device, major, enabled, has_event):
    """Records of events come with those of synchronization up to CUDA 12.8, by themselves since 12.9."""
    done = on_device(RECORD.format(major=major, kinds=enabled))
    assert done.stderr == ""
    kinds, names, durations, gap, shapes, is_linked = done.stdout.splitlines()
    # external, launch, kernel; launch, kernel; memset; copy; event; the wait as a call and as a synchronization
    assert kinds == str([39, 5, 10, 5, 10, 5, 2, 5, 1, 5, *([36] if has_event else []), 5, 38])
    assert names == "[b'first', b'second']"
    assert shapes == "[(1, 1, 1, 1, 1, 1), (24, 1, 1, 544, 1, 1)]"
    assert (durations, gap, is_linked) == (str([10_000] * 4), "0", "True")


ASK = """
    import ctypes as c
    nvml = c.CDLL("libnvidia-ml.so.1")
    assert not nvml.nvmlInit_v2()
    first, second = c.c_void_p(), c.c_void_p()
    nvml.nvmlDeviceGetHandleByIndex_v2(0, c.byref(first))
    nvml.nvmlDeviceGetHandleByIndex_v2({other}, c.byref(second))
    number, status, name = c.c_int(), c.c_int(), c.create_string_buffer(96)
    links = [nvml.nvmlDeviceGetNvLinkState(first, link, c.byref(number)) == 0 for link in range(18)]
    nvml.nvmlDeviceGetP2PStatus(first, second, 2, c.byref(status))
    nvml.nvmlDeviceGetName(first, name, 96)
    count = c.c_uint()
    nvml.nvmlDeviceGetCount_v2(c.byref(count))
    print(count.value, name.value.decode(), sum(links), status.value)
"""


@pytest.mark.parametrize(
    ("gpu", "other", "answer"),
    [
        (("pcie", 0), 1, "0 5"),
        (("nvlink_pairs", 4), 1, "4 0"),
        (("nvlink_pairs", 4), 2, "4 5"),
        (("nvswitch", 18), 2, "18 0"),
    ],
)
def test_links_are_those_of_the_preset(tmp_path, on_device, gpu, other, answer):
    description = {"name": "NVIDIA X", "num_devices": 4, "link": gpu[0], "num_nvlinks": gpu[1]}
    (tmp_path / "gpu.json").write_text(json.dumps(description))
    done = on_device(ASK.format(other=other), LAGOM_EMULATION_GPU=str(tmp_path / "gpu.json"))
    assert (done.stdout, done.stderr) == (f"4 NVIDIA X {answer}\n", "")


def test_an_unknown_link_is_refused_with_one_line(tmp_path, on_device):
    (tmp_path / "gpu.json").write_text('{"link": "rope"}')
    done = on_device(
        'import ctypes as c\nprint(c.CDLL("libcuda.so.1").cuInit(0))', LAGOM_EMULATION_GPU=str(tmp_path / "gpu.json")
    )
    assert done.stdout == "803\n"
    assert done.stderr.startswith("lagom emulate: link of the GPU description is none of pcie")
