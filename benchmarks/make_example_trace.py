"""Makes the trace of `lagom analyze --example`: a rank of a made-up FSDP2 job on eight H100. Nothing is measured.

A transformer of six layers, five steps. Each layer's parameters are gathered one layer ahead, gradients are
reduce-scattered, both on one communicator, which runs one collective at a time: in the backward pass all-gathers queue
behind reduce-scatters, and the computation waits for both. Kernels take 12 % longer while a collective
runs. Lengths scatter by 1 %, from a fixed seed.

Run: python benchmarks/make_example_trace.py
"""

import gzip
import json
import random
from pathlib import Path

OUT = Path(__file__).parents[1] / "src" / "lagom_overlap" / "trace" / "example_trace.json.gz"
LAYERS, STEPS = 6, 5
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_execute_segment_k_off_kernel"
ATTENTION = "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>(Params)"
NORM = "void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float, c10::BFloat16 const*)"
ADAM = "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>(TensorListMetadata<4>)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_SIMPLE(ncclDevKernelArgsStorage<4096ul>)"
FORWARD = ((NORM, 21.0), (GEMM, 150.0), (ATTENTION, 95.0), (GEMM, 55.0), (NORM, 20.0), (GEMM, 190.0), (GEMM, 175.0))
BLOCKS = (2048, 128, 264, 96, 2049, 192, 132)
ELEMENTS = 100_663_296
STRETCH = 1.12


class Rank:
    """A CPU that runs ahead, a stream that computes and one that communicates; times in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []
        self.random = random.Random(7)
        self.cpu = 0.0
        self.comp = self.comm = 60.0
        self.busy: list[tuple[float, float]] = []
        self.correlation = 0
        self.sequence = 0

    def add(self, name: str, cat: str, start: float, length: float, tid: int, **args: object) -> None:
        """One event."""
        pid = 0 if cat == "kernel" else 100
        times = {"ts": round(start, 3), "dur": round(length, 3)}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args})

    def launch(self, tid: int) -> float:
        """A launch; the CPU's time after it."""
        self.correlation += 1
        self.add("cudaLaunchKernel", "cuda_runtime", self.cpu, 4, tid, correlation=self.correlation)
        self.cpu += 6
        return self.cpu

    def compute(self, name: str, length: float, after: float, tid: int, blocks: int) -> float:
        """A kernel that waits until `after`; its end."""
        start = max(self.comp + 1.5, after, self.launch(tid))
        length *= self.random.uniform(0.99, 1.01)
        if any(begin < start + length and start < end for begin, end in self.busy[-2:]):
            length *= STRETCH
        self.place(name, start, length, (7, blocks, 384))
        self.comp = start + length
        return self.comp

    def collective(self, name: str, length: float, after: float, tid: int) -> float:
        """A collective of one layer; its end."""
        launched = self.launch(tid)
        start = max(self.comm + 3, after, launched)
        length *= self.random.uniform(0.99, 1.01)
        is_gather = name == GATHER
        shard = ELEMENTS // 8
        self.place(
            name, start, length, (20, 16, 544),
            **{
                "Collective name": "_allgather_base" if is_gather else "_reduce_scatter_base",
                "In msg nelems": shard if is_gather else ELEMENTS,
                "Out msg nelems": ELEMENTS if is_gather else shard,
                "Group size": 8,
                "dtype": "BFloat16",
                "Process Group Name": "1",
                "Process Group Description": "fsdp",
                "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
                "Seq": self.sequence,
            },
        )  # fmt: skip
        self.sequence += 1
        self.comm = start + length
        self.busy.append((start, self.comm))
        return self.comm

    def place(self, name: str, start: float, length: float, launch: tuple[int, int, int], **more: object) -> None:
        """A kernel on a stream with so many blocks of so many threads."""
        stream, blocks, threads = launch
        sizes = {"grid": [blocks, 1, 1], "block": [threads, 1, 1]}
        held = {"device": 0, "stream": stream, "correlation": self.correlation, **sizes}
        self.add(name, "kernel", start, length, stream, **held, **more)


def forward(rank: Rank) -> None:
    """The forward pass."""
    begin = rank.cpu
    gathered = [rank.collective(GATHER, 650, 0, 1)]
    for layer in range(LAYERS):
        if layer + 1 < LAYERS:
            gathered.append(rank.collective(GATHER, 650, 0, 1))
        rank.add(f"FSDP::pre_forward (layers.{layer})", "user_annotation", rank.cpu, 5, 1)
        for (name, length), blocks in zip(FORWARD, BLOCKS, strict=True):
            rank.compute(name, length, gathered[layer], 1, blocks)
    rank.add("FSDP::root_pre_forward", "user_annotation", begin, 5, 1)


def backward(rank: Rank) -> None:
    """The backward pass."""
    gathered, reduced = rank.collective(GATHER, 650, 0, 2), 0.0
    for layer in reversed(range(LAYERS)):
        begin = rank.cpu
        ahead = rank.collective(GATHER, 650, 0, 2) if layer else 0.0
        for (name, length), blocks in reversed(tuple(zip(FORWARD, BLOCKS, strict=True))):
            done = rank.compute(name, 1.9 * length, gathered, 2, blocks + 1)
        rank.add(f"autograd::engine::evaluate_function: Layer{layer}", "cpu_op", begin, rank.cpu - begin, 2)
        reduced = rank.collective(SCATTER, 1150, done, 2)
        gathered = ahead
    rank.comp = max(rank.comp, reduced)


def step(rank: Rank, number: int) -> None:
    """One step."""
    begin = rank.cpu
    forward(rank)
    backward(rank)
    start = rank.cpu
    for _ in range(3):
        rank.compute(ADAM, 210, 0, 1, blocks=264)
    rank.add("Optimizer.step#AdamW.step", "user_annotation", start, rank.cpu - start, 1)
    rank.cpu = max(rank.cpu, rank.comp - 300)
    rank.add(f"ProfilerStep#{number}", "user_annotation", begin, rank.cpu - begin, 1)


def main() -> None:
    """Writes the file."""
    rank = Rank()
    for number in range(STEPS):
        step(rank, number + 10)
    held = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": n, "name": "NVIDIA H100 80GB HBM3", "numSms": 132} for n in range(8)],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8, "nccl_version": "2.29.7"},
        "comment": "made up by benchmarks/make_example_trace.py; nothing is measured",
        "traceEvents": rank.events,
    }
    OUT.write_bytes(gzip.compress(json.dumps(held, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":
    main()
