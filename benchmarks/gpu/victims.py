"""Victims: the computations whose slowdown is measured, each as a CUDA graph of back-to-back launches.

Operands rotate among several sets, so that a launch does not find its inputs in the L2 because the last one left them
there. Random operands: zeros run faster than real data on this hardware family.
"""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

BATCH_S = 3e-3  # aimed length of a batch alone
MAX_LAUNCHES = 200
NUM_SETS = 4
GEMM_K_N = ((2560, 2560), (2560, 10240), (10240, 2560), (4096, 4096), (4096, 14336))  # (K, N)
GEMM_M = (1024, 2048, 3072, 4096)
# M, N with K = 4096 and 128 x 256 tiles: 128, 256 and 512 of them, the wave predictions of the model
TRITON_M_N = ((2048, 2048), (2048, 4096), (4096, 4096))
TOLERANCE = 1e-2  # bf16 against float64, Frobenius norm

Launch = Callable[[int], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class VictimSpec:
    """A victim by name, with the functions that run it once on operand set i and that say what is right."""

    name: str
    make: Callable[[], tuple[Launch, Launch]]


class Victim:
    """A checked, captured victim on its own stream."""

    def __init__(self, spec: VictimSpec) -> None:
        self.name = spec.name
        self.stream = torch.cuda.Stream(priority=0)
        launch, reference = spec.make()
        torch.cuda.synchronize()  # operands are made on the default stream
        with torch.cuda.stream(self.stream):
            for i in range(NUM_SETS):
                got = launch(i)
            self.error = relative_error(got, reference(NUM_SETS - 1))
            if not self.error < TOLERANCE:  # NaN fails too
                raise RuntimeError(f"{spec.name}: relative error {self.error:.2e}, allowed {TOLERANCE:.0e}")
            self.kernels = kernels_of(launch)
            self.num_launches = self._count(launch)
        self.stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self.stream):
            for i in range(self.num_launches):
                launch(i % NUM_SETS)
        self._launch = launch  # its operands must outlive the graph

    def run(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Enqueue the batch between two events; does not wait."""
        with torch.cuda.stream(self.stream):
            start.record(self.stream)
            self._graph.replay()
            end.record(self.stream)

    def _count(self, launch: Launch) -> int:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self.stream)
        for i in range(8):
            launch(i % NUM_SETS)
        end.record(self.stream)
        end.synchronize()
        one_s = start.elapsed_time(end) * 1e-3 / 8  # ms, eight launches
        return min(MAX_LAUNCHES, max(NUM_SETS, math.ceil(BATCH_S / one_s)))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over norm of the reference, in float64."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def kernels_of(launch: Launch) -> dict[str, str]:
    """Grid, block, registers and shared memory of each kernel of one launch, as the profiler exports them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        launch(0)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = ("grid", "block", "registers per thread", "shared memory")
    return {
        event["name"][:160]: ", ".join(f"{key} {event['args'].get(key)}" for key in wanted)
        for event in events
        if event.get("cat") == "kernel"
    }


def gemm_spec(m: int, k: int, n: int) -> VictimSpec:
    """A bf16 GEMM of cuBLAS, through torch."""

    def make() -> tuple[Launch, Launch]:
        a, b, c = random_sets((m, k)), random_sets((k, n)), random_sets((m, n))
        return lambda i: torch.mm(a[i], b[i], out=c[i]), lambda i: a[i].double() @ b[i].double()

    return VictimSpec(name=f"gemm_cublas_{m}x{n}x{k}", make=make)


def triton_spec(m: int, n: int, k: int = 4096) -> VictimSpec:
    """The tile-per-block GEMM of triton_gemm.py."""

    def make() -> tuple[Launch, Launch]:
        import triton_gemm as t  # noqa: PLC0415 - triton is on the GPU machine only

        if m % t.TILE_M or n % t.TILE_N or k % t.TILE_K:
            raise ValueError(f"{m} x {n} x {k} is not made of whole tiles")
        a, b, c = random_sets((m, k)), random_sets((k, n)), random_sets((m, n))
        grid = ((m // t.TILE_M) * (n // t.TILE_N),)
        options = {"num_warps": t.NUM_WARPS, "num_stages": t.NUM_STAGES}

        def launch(i: int) -> torch.Tensor:
            t.gemm_kernel[grid](a[i], b[i], c[i], m, n, k, t.TILE_M, t.TILE_N, t.TILE_K, **options)
            return c[i]

        return launch, lambda i: a[i].double() @ b[i].double()

    return VictimSpec(name=f"gemm_triton_{m}x{n}x{k}", make=make)


def attention_spec(batch: int = 4, heads: int = 32, length: int = 2048, width: int = 128) -> VictimSpec:
    """FlashAttention forward, causal, bf16."""

    def make() -> tuple[Launch, Launch]:
        q, k, v = (random_sets((batch, heads, length, width)) for _ in range(3))
        backend = torch.nn.attention.SDPBackend.FLASH_ATTENTION

        def launch(i: int) -> torch.Tensor:
            with torch.nn.attention.sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(q[i], k[i], v[i], is_causal=True)

        def reference(i: int) -> torch.Tensor:
            scores = q[i].float() @ k[i].float().transpose(-1, -2) / math.sqrt(width)
            hidden = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
            return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[i].float()

        return launch, reference

    return VictimSpec(name=f"sdpa_{batch}x{heads}x{length}x{width}", make=make)


def add_spec(num_bytes: int = 256 << 20) -> VictimSpec:
    """An elementwise sum, bf16, `num_bytes` each: bound by memory."""

    def make() -> tuple[Launch, Launch]:
        shape = (num_bytes // 2,)
        a, b, c = random_sets(shape), random_sets(shape), random_sets(shape)
        return lambda i: torch.add(a[i], b[i], out=c[i]), lambda i: a[i].double() + b[i].double()

    return VictimSpec(name=f"add_{num_bytes >> 20}mib", make=make)


def layer_norm_spec(rows: int = 16384, width: int = 4096) -> VictimSpec:
    """Layer norm over the last dimension, bf16."""

    def make() -> tuple[Launch, Launch]:
        x = random_sets((rows, width))
        return lambda i: functional.layer_norm(x[i], (width,)), lambda i: functional.layer_norm(x[i].double(), (width,))

    return VictimSpec(name=f"layer_norm_{rows}x{width}", make=make)


def random_sets(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """`NUM_SETS` standard normal bf16 tensors."""
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(NUM_SETS)]


def all_specs() -> list[VictimSpec]:
    """Every victim, the three of the dense sweeps first."""
    dense = [gemm_spec(4096, 4096, 4096), triton_spec(4096, 4096), add_spec()]
    triton = [triton_spec(m, n) for m, n in TRITON_M_N]
    cublas = [gemm_spec(m, k, n) for k, n in GEMM_K_N for m in GEMM_M]
    rest = [*triton, attention_spec(), layer_norm_spec(), *cublas]
    names = {spec.name for spec in dense}
    return dense + [spec for spec in rest if spec.name not in names]
