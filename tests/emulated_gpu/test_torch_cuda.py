"""Stock PyTorch's CUDA build on emulated devices, without a coordinator: an operation takes 10 us of virtual time."""

import json
import os
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.cuda_torch, pytest.mark.timeout(300)]

PRELOADED = ("libcuda.so.1", "libcudart", "libcublasLt", "libcublas", "libcupti", "libnvidia-ml.so.1")
PREPARE = """
import torch
torch.backends.cudnn.enabled = False  # the real cuDNN does not run here
torch.backends.cuda.enable_cudnn_sdp(False)
"""


@pytest.fixture
def on_torch(libraries: Path) -> Callable[..., str]:
    python = os.environ.get("LAGOM_CUDA_PYTHON")
    if not python:
        pytest.skip("LAGOM_CUDA_PYTHON names no Python with PyTorch's CUDA build")

    def run(code: str, **environment: str) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("LAGOM_", "CUDA_"))}
        found = [str(path) for word in PRELOADED for path in sorted(libraries.glob(f"{word}*"))]
        paths = {"LD_LIBRARY_PATH": str(libraries), "LD_PRELOAD": ":".join(found)}
        done = subprocess.run(
            [python, "-c", PREPARE + textwrap.dedent(code)],
            env=clean | paths | environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def test_a_training_step_with_adamw_runs_and_is_timed(on_torch):
    out = on_torch("""
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x, target = torch.randn(64, 256).cuda(), torch.zeros(64, dtype=torch.long, device="cuda")
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        times.append(round(start.elapsed_time(end), 3))
    print(torch.cuda.is_available(), torch.cuda.get_device_name(0), times[1] == times[2] > 0.1)
    """)
    assert out == "True NVIDIA H100 80GB HBM3 True\n"


def test_values_that_decide_the_flow_are_exact(on_torch):
    out = on_torch("""
    def same(device, host):
        assert torch.equal(device.cpu(), host), (device.cpu(), host)
    x = torch.randn(7, 11, 13)
    y = x.cuda()
    same(y, x)
    same(y.permute(2, 0, 1).contiguous(), x.permute(2, 0, 1).contiguous())
    same(y[::2, 1::3].contiguous(), x[::2, 1::3].contiguous())
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.bool):
        same(y.to(dtype), x.to(dtype))
        same(torch.ones(1003, dtype=dtype, device="cuda"), torch.ones(1003, dtype=dtype))
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        same(torch.arange(3, 50, 2, dtype=dtype, device="cuda"), torch.arange(3, 50, 2, dtype=dtype))
    part, whole = torch.zeros(3, 5, device="cuda"), torch.zeros(3, 5)
    part[:, :2].fill_(1.5)
    whole[:, :2].fill_(1.5)
    same(part, whole)
    print("exact")
    """)
    assert out == "exact\n"


def test_memory_beyond_the_gpu_raises_pytorchs_own_error(on_torch, tmp_path):
    (tmp_path / "gpu.json").write_text(json.dumps({"name": "A40", "memory_bytes": 48_000_000_000}))
    out = on_torch(
        """
    held = torch.empty(40_000_000_000, dtype=torch.uint8, device="cuda")
    try:
        torch.empty(9_000_000_000, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        print("44.70 GiB" in str(error), torch.cuda.max_memory_allocated())
    """,
        LAGOM_EMULATION_GPU=str(tmp_path / "gpu.json"),
    )
    assert out == "True 40000000000\n"


def test_a_graph_replays(on_torch):
    out = on_torch("""
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1000, device="cuda")
    with torch.cuda.graph(graph):
        x.fill_(4.0)
        y = x @ x
    print(x.cpu().sum().item())
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    print(x.cpu().sum().item(), start.elapsed_time(end) >= 0.02)
    """)
    assert out == "0.0\n4000.0 True\n"


def test_the_profilers_trace_has_kernels_with_virtual_times(on_torch, tmp_path):
    trace = tmp_path / "trace.json"
    on_torch(f"""
    from torch.profiler import ProfilerActivity, profile
    x = torch.randn(256, 256).cuda()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(5):
            y = x @ x
        y.cpu()
        torch.cuda.synchronize()
    recorded.export_chrome_trace({str(trace)!r})
    """)
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    calls = [event for event in events if event.get("cat") == "cuda_runtime" and "Launch" in event["name"]]
    assert [event["name"] for event in kernels] == ["emulated_gemm_float32"] * 5
    # Within the resolution of the processor's counter, by which PyTorch's profiler converts.
    assert all(event["dur"] == pytest.approx(10, rel=0.01) for event in kernels + copies)
    assert len(copies) == 1
    assert {event["args"]["correlation"] for event in kernels} == {event["args"]["correlation"] for event in calls}
