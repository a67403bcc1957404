"""Record small Kineto traces of GEMMs during real collectives: two NCCL ranks on one GPU, in one process.

Each step enqueues one collective per layer on the communication streams and the layer's GEMMs on the compute stream, as
a data-parallel step does; `ProfilerStep` annotations mark the steps. One gzip trace per (collective, channels).
"""

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from nccl_pair import NcclPair, load_library

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost.measured_surface import InjectorSetting
from lagom_overlap.engines.nccl.library import NcclLibrary

SHAPE = 4096  # GEMMs are SHAPE cubed
NUM_LAYERS, GEMMS_PER_LAYER, NUM_STEPS = 4, 3, 3
RECORDINGS = (
    (CollectiveKind.ALL_GATHER, 2),
    (CollectiveKind.ALL_GATHER, 16),
    (CollectiveKind.REDUCE_SCATTER, 8),
    (CollectiveKind.ALL_REDUCE, 8),
)
MESSAGE_BYTES = 64 << 20


def record(library: NcclLibrary, kind: CollectiveKind, num_channels: int, path: Path) -> int:
    """Write one trace; return its compressed size in bytes."""
    setting = InjectorSetting(injector=kind, num_channels=num_channels, num_ranks=2, message_bytes=MESSAGE_BYTES)
    pair = NcclPair(library, kind, setting)
    a, b = (torch.randn(SHAPE, SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    torch.cuda.synchronize()
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=NUM_STEPS, repeat=1)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, schedule=schedule, record_shapes=True) as profiler:
        for _ in range(1 + NUM_STEPS):
            for _ in range(NUM_LAYERS):
                pair.enqueue_once()
                for _ in range(GEMMS_PER_LAYER):
                    torch.mm(a, b, out=out)
            torch.cuda.synchronize()
            profiler.step()
    pair.close()
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    trace = json.loads(plain.read_text())
    plain.unlink()
    kernels = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    if not any("nccl" in name.lower() for name in kernels):
        raise RuntimeError(f"{path.name}: no NCCL kernel among {len(kernels)} kernels of the trace")
    with gzip.GzipFile(path, "wb", mtime=0) as stream:  # mtime 0: same trace, same bytes
        stream.write(json.dumps(trace, separators=(",", ":")).encode())
    return path.stat().st_size


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nccl-library", type=Path, required=True, help="libnccl.so.2 >= 2.30.3")
    parser.add_argument("--out", type=Path, default=Path("traces"), help="folder for the .json.gz traces")
    parser.add_argument("--json", action="store_true", help="a summary object on stdout")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    library = load_library(options.nccl_library)
    sizes = {}
    for kind, num_channels in RECORDINGS:
        path = options.out / f"{kind}_{num_channels}ch.json.gz"
        sizes[path.name] = record(library, kind, num_channels, path)
    print(json.dumps(sizes) if options.json else sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
