"""Memory of jobs as `simulate` counts it, against what PyTorch's own allocator needs for them on emulated GPUs.

    LAGOM_CUDA_PYTHON=.venv-cuda/bin/python python benchmarks/memory_accuracy.py [--measure] [NAME ...]

With `--measure` each job, `benchmarks/emulated_stacks/llama_fsdp2.py` with other sizes and switches, runs three steps
under `lagom emulate`: PyTorch's allocator and Python code are the real ones, and so are the peaks that it reports, as
long as kernels ask for the workspace that they ask for on a GPU. One process stands for each host's ranks
(`--symmetric`). The peaks are kept in `benchmarks/results/memory_emulated.csv`; without `--measure` they are read from
there. Prints a table in Markdown and the mean and largest errors.
No constant of what is allocated is fitted, three of what is reserved are, on all jobs. Which moments and copies are
counted was found with round 1 in sight, and the moment of a layer's backward mended when round 2 had been run. Round 3
was run once, at the end: it is the left-out figure.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

from lagom_overlap.jobfile.job import Job as TrainingJob
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.units import GIB
from lagom_overlap.workload.parallel import StageMemory

HERE = Path(__file__).parent.resolve()
SCRIPT = HERE / "emulated_stacks" / "llama_fsdp2.py"
PEAKS = HERE / "results" / "memory_emulated.csv"
STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model of the script: Llama's layers with other sizes, embedding and head apart."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


LLAMA_8B = Shape(hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256)
LLAMA_7B = Shape(hidden=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)
LLAMA_3B = Shape(hidden=3072, ffn=8192, heads=24, kv_heads=8, head_dim=128, vocab=128256)
LLAMA_1B = Shape(hidden=2048, ffn=8192, heads=32, kv_heads=8, head_dim=64, vocab=128256)
QWEN_8B = Shape(hidden=4096, ffn=12288, heads=32, kv_heads=8, head_dim=128, vocab=151936)
LLAMA_13B = Shape(hidden=5120, ffn=13824, heads=40, kv_heads=40, head_dim=128, vocab=32000)
LLAMA_70B = Shape(hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, vocab=128256)
QWEN_4B = Shape(hidden=2560, ffn=9728, heads=32, kv_heads=8, head_dim=128, vocab=151936)
SMALL = Shape(hidden=1024, ffn=4096, heads=16, kv_heads=16, head_dim=64, vocab=50304)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job of both sides: `hosts` of one process each, or of `tensor`; `switches` are the script's environment."""

    name: str
    shape: Shape
    layers: int
    hosts: int
    seq_len: int = 8192
    micro_batch: int = 1
    micro_batches: int = 1
    tensor: int = 1
    replicate: int = 1
    parallel: Mapping[str, object] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    round: int = 1


DDP, COPIES = {"zero_stage": 0, "framework": "ddp"}, {"DDP": "1"}
WHOLE, STAYS = {"zero_stage": 2}, {"RESHARD": "0"}
FULL, AGAIN = {"recompute": "full"}, {"RECOMPUTE": "full"}
PRODUCTS, CHOSEN = {"recompute": "products"}, {"RECOMPUTE": "1"}
TITAN, APART = {"framework": "torchtitan"}, {"JOINT": "", "FREE_LOGITS": "1"}
JOBS = (
    Job(name="8b_8", shape=LLAMA_8B, layers=32, hosts=8),
    Job(name="8b_64", shape=LLAMA_8B, layers=32, hosts=64),
    Job(name="8b_4_layers", shape=LLAMA_8B, layers=4, hosts=8),
    Job(name="8b_short", shape=LLAMA_8B, layers=8, hosts=8, seq_len=2048, micro_batch=4),
    Job(name="8b_whole", shape=LLAMA_8B, layers=8, hosts=8, parallel=WHOLE, switches=STAYS),
    Job(name="8b_full", shape=LLAMA_8B, layers=32, hosts=8, micro_batch=2, parallel=FULL, switches=AGAIN),
    Job(name="8b_products", shape=LLAMA_8B, layers=32, hosts=8, parallel=PRODUCTS, switches=CHOSEN),
    Job(name="8b_long_full", shape=LLAMA_8B, layers=32, hosts=16, seq_len=16384, parallel=FULL, switches=AGAIN),
    Job(name="7b", shape=LLAMA_7B, layers=32, hosts=16, seq_len=4096, micro_batch=2),
    Job(name="7b_full", shape=LLAMA_7B, layers=32, hosts=8, seq_len=4096, micro_batch=4, parallel=FULL, switches=AGAIN),
    Job(name="3b", shape=LLAMA_3B, layers=28, hosts=4, seq_len=4096, micro_batch=2),
    Job(name="1b_2", shape=LLAMA_1B, layers=16, hosts=2, seq_len=4096),
    Job(name="1b_ddp", shape=LLAMA_1B, layers=16, hosts=4, seq_len=4096, parallel=DDP, switches=COPIES),
    Job(name="1b_ddp_2", shape=LLAMA_1B, layers=16, hosts=4, seq_len=2048, micro_batches=2, parallel=DDP,
        switches=COPIES),
    Job(name="small_ddp", shape=SMALL, layers=24, hosts=8, seq_len=1024, micro_batch=8, parallel=DDP, switches=COPIES),
    Job(name="8b_tp2", shape=LLAMA_8B, layers=16, hosts=4, tensor=2, parallel=TITAN, switches=APART),
    Job(name="8b_tp4_full", shape=LLAMA_8B, layers=32, hosts=2, tensor=4, micro_batch=2, parallel=TITAN | FULL,
        switches=APART | AGAIN),
    Job(name="3b_hsdp", shape=LLAMA_3B, layers=28, hosts=8, seq_len=4096, replicate=2),
    Job(name="3b_2_micro", shape=LLAMA_3B, layers=28, hosts=8, seq_len=4096, micro_batches=2),
    Job(name="8b_update", shape=LLAMA_8B, layers=32, hosts=4, seq_len=1024),
    Job(name="qwen", shape=QWEN_8B, layers=36, hosts=16, seq_len=4096),
    Job(name="8b_apart", shape=LLAMA_8B, layers=16, hosts=8, parallel=TITAN, switches=APART),
    Job(name="8b_apart_products", shape=LLAMA_8B, layers=32, hosts=8, parallel=TITAN | PRODUCTS,
        switches=APART | CHOSEN),
    Job(name="qwen_4b_full", shape=QWEN_4B, layers=36, hosts=2, seq_len=4096, parallel=FULL, switches=AGAIN, round=2),
    Job(name="13b_products", shape=LLAMA_13B, layers=40, hosts=32, seq_len=4096, parallel=PRODUCTS, switches=CHOSEN,
        round=2),
    Job(name="small_ddp_full", shape=SMALL, layers=24, hosts=4, seq_len=4096, micro_batch=2, parallel=DDP | FULL,
        switches=COPIES | AGAIN, round=2),
    Job(name="8b_whole_3", shape=LLAMA_8B, layers=12, hosts=8, seq_len=2048, micro_batches=3, parallel=WHOLE,
        switches=STAYS,
        round=2),
    Job(name="3b_tp2_2", shape=LLAMA_3B, layers=28, hosts=4, tensor=2, micro_batches=2, seq_len=4096, parallel=TITAN,
        switches=APART, round=2),
    Job(name="70b_8_layers", shape=LLAMA_70B, layers=8, hosts=16, seq_len=4096, round=2),
    Job(name="1b_hsdp_full", shape=LLAMA_1B, layers=16, hosts=8, replicate=4, seq_len=8192, micro_batch=2,
        parallel=FULL,
        switches=AGAIN, round=2),
    Job(name="7b_short", shape=LLAMA_7B, layers=32, hosts=8, seq_len=512, micro_batch=2, round=2),
    Job(name="70b_full", shape=LLAMA_70B, layers=10, hosts=32, seq_len=2048, parallel=FULL, switches=AGAIN, round=3),
    Job(name="13b_short", shape=LLAMA_13B, layers=20, hosts=16, seq_len=1024, round=3),
    Job(name="3b_tp2_products", shape=LLAMA_3B, layers=28, hosts=4, tensor=2, parallel=TITAN | PRODUCTS,
        switches=APART | CHOSEN, round=3),
    Job(name="1b_ddp_products", shape=LLAMA_1B, layers=16, hosts=2, seq_len=2048, micro_batches=2,
        parallel=DDP | PRODUCTS,
        switches=COPIES | CHOSEN, round=3),
    Job(name="7b_whole_full", shape=LLAMA_7B, layers=16, hosts=8, seq_len=2048, micro_batch=4, parallel=WHOLE | FULL,
        switches=STAYS | AGAIN, round=3),
    Job(name="qwen_4b_hsdp", shape=QWEN_4B, layers=36, hosts=8, replicate=2, seq_len=2048, micro_batch=2,
        micro_batches=2,
        round=3),
)  # fmt: skip


def measured(job: Job, python: str) -> tuple[int, int]:
    """Peaks of allocated and reserved bytes, of the fullest rank."""
    s = job.shape
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JOINT": "1",
            "SHAPE": f"{s.hidden},{s.ffn},{s.heads},{s.kv_heads},{s.head_dim},{s.vocab}",
            "SEQUENCE": str(job.seq_len),
            "BATCH": str(job.micro_batch),
            "MICRO_BATCHES": str(job.micro_batches),
            "TENSOR": str(job.tensor),
            "REPLICAS": str(job.replicate),
            "PEAKS": f"{folder}/peak",
            **job.switches,
        }
        emulate = [
            python,
            "-m",
            "lagom_overlap",
            "emulate",
            "--cluster",
            "h200",
            "--nodes",
            str(job.hosts),
            "--symmetric",
        ]
        torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(job.tensor), str(SCRIPT)]
        command = [*emulate, "--", *torchrun, str(job.layers), str(STEPS)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        peaks = [tuple(map(int, path.read_text().split())) for path in Path(folder).glob("peak.*")]
    if done.returncode or not peaks:
        sys.exit(f"{job.name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return max(peak[0] for peak in peaks), max(peak[1] for peak in peaks)


def counted(job: Job) -> StageMemory:
    """What `simulate` counts."""
    s = job.shape
    data = job.hosts
    sizes = {"hidden": s.hidden, "ffn": s.ffn, "num_heads": s.heads, "num_kv_heads": s.kv_heads, "head_dim": s.head_dim}
    model = {"name": job.name, "num_layers": job.layers, **sizes, "vocab": s.vocab, "gated": True}
    parallel: dict[str, object] = {
        "micro_batch": job.micro_batch,
        "global_batch": job.micro_batch * job.micro_batches * data,
    }
    parallel |= {"framework": "fsdp2", "data": data, "zero_stage": 3, "replicate": job.replicate, "tensor": job.tensor}
    parallel |= {"sequence_parallel": job.tensor > 1} | job.parallel
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.toml").write_text(_toml(model))
        tables = {
            "job": {"name": job.name, "backend": "simulated"},
            "model": {"name": f"{folder}/model.toml", "seq_len": job.seq_len},
            "cluster": {"preset": "h200"},
            "parallel": parallel,
        }
        path = Path(folder) / "job.toml"
        path.write_text("\n".join(f"[{name}]\n{_toml(table)}" for name, table in tables.items()))
        step = TrainingJob(read_job(path)).step
    assert step is not None
    (memory,) = step.memories
    return memory


def _toml(table: Mapping[str, object]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


def report(jobs: Iterable[Job], peaks: Mapping[str, tuple[int, int]]) -> None:
    """Prints the table and what it comes to."""
    print("| round | job | allocated | simulate | | reserved | simulate | |\n|---|---|---|---|---|---|---|---|")
    errors: dict[str, list[float]] = {}
    for job in (job for job in jobs if job.name in peaks):
        memory, cells = counted(job), ""
        for what, peak, found in zip(
            ("allocated", "reserved"), peaks[job.name], (memory.total_bytes, memory.reserved_bytes), strict=True
        ):
            errors.setdefault(f"{what}, round {job.round}", []).append(abs(found / peak - 1))
            errors.setdefault(f"{what}, all", []).append(abs(found / peak - 1))
            cells += f" {peak / GIB:.2f} GiB | {found / GIB:.2f} GiB | {found / peak - 1:+.1%} |"
        print(f"| {job.round} | {job.name} |{cells}")
    print()
    for what, sizes in sorted(errors.items()):
        print(f"{what}: {len(sizes)} jobs, mean {fmean(sizes):.1%}, worst {max(sizes):.1%}")
    shares = [reserved / allocated for allocated, reserved in peaks.values()]
    print(f"reserved over allocated: median {median(shares):.2f}, {min(shares):.2f} to {max(shares):.2f}")


def main() -> None:
    """Measures what is asked for, and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    jobs = [job for job in JOBS if not arguments.names or job.name in arguments.names]
    peaks = {}
    if PEAKS.exists():
        with PEAKS.open(newline="") as file:
            peaks = {row["job"]: (int(row["allocated"]), int(row["reserved"])) for row in csv.DictReader(file)}
    if arguments.measure:
        for job in jobs:
            peaks[job.name] = measured(job, os.environ["LAGOM_CUDA_PYTHON"])
            with PEAKS.open("w", newline="") as file:
                rows = csv.writer(file, lineterminator="\n")
                rows.writerow(("job", "allocated", "reserved"))
                rows.writerows((name, *peak) for name, peak in sorted(peaks.items()))
            print(job.name, *peaks[job.name], file=sys.stderr, flush=True)
    report(jobs, peaks)


if __name__ == "__main__":
    main()
