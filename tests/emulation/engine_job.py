"""What PyTorch's engine makes of a job that never names a current device; each of four ranks writes what it saw."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lagom_overlap.errors import BackendError
from lagom_overlap.online.device import engine_in_use, job_device
from lagom_overlap.online.routes.sibling import open_nccl_sibling
from lagom_overlap.trace.reader import ReadOptions, read_file


def main() -> None:
    rank, folder = int(os.environ["RANK"]), Path(os.environ["SEEN"])
    if os.environ["TORCH_DIST_USE_NCCL2"] == "0":  # the engine before does not know its rank's GPU
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl")  # as under srun, which shows every task all GPUs
    device = torch.device("cuda", rank)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    seen = {"engine": engine_in_use(), "device": str(job_device()), "current": torch.cuda.current_device()}
    one = torch.ones(1 << 20, device=device)
    dist.all_reduce(one, group=halves[rank // 2])
    try:
        open_nccl_sibling(halves[rank // 2], (2, None))
    except BackendError as error:
        seen["sibling"] = str(error)
    outputs = [torch.empty_like(one) for _ in range(4)]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        dist.all_gather(outputs, one)
        one.view(1024, 1024) @ one.view(1024, 1024)
        torch.cuda.synchronize(device)
    path = folder / f"trace.{rank}.json"
    profiled.export_chrome_trace(str(path))
    (trace,) = read_file(path, ReadOptions())
    seen["calls"] = [[call.op, call.num_bytes] for call in trace.calls]
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


main()
