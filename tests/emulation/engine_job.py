"""What PyTorch's engine makes of a job that never names a current device; each of four ranks writes what it saw."""

import json
import os
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as distributed_c10d
from torch.profiler import ProfilerActivity, profile

from lagom_overlap.errors import BackendError
from lagom_overlap.online.device import engine_in_use, job_device, note_model
from lagom_overlap.online.routes.sibling import open_nccl_sibling
from lagom_overlap.trace.reader import ReadOptions, read_file


def made(group: dist.ProcessGroup) -> str:
    """What becomes of a sibling."""
    try:
        open_nccl_sibling(group, (2, None))
    except BackendError as error:
        return str(error)
    return ""


def main() -> None:
    rank, folder = int(os.environ["RANK"]), Path(os.environ["SEEN"])
    dist.init_process_group("nccl")  # as under srun, which shows every task all GPUs
    device = torch.device("cuda", rank)
    model = torch.nn.Linear(8, 8, device=device)
    note_model(model)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    seen = {"engine": engine_in_use(), "device": str(job_device()), "current": torch.cuda.current_device()}
    one = torch.ones(1 << 20, device=device)
    dist.all_reduce(one, group=halves[rank // 2])
    used: list[str] = []
    native = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **how: (used.append(str(tensor.device)), native(tensor, *args, **how))[1]
    thread = Thread(target=lambda: seen.update(sibling=made(halves[rank // 2])))  # as settings are prepared
    thread.start()
    thread.join()
    dist.all_reduce = native
    seen["used"] = used
    outputs = [torch.empty_like(one) for _ in range(4)]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        dist.all_gather(outputs, one)
        one.view(1024, 1024) @ one.view(1024, 1024)
        torch.cuda.synchronize(device)
    path = folder / f"trace.{rank}.json"
    profiled.export_chrome_trace(str(path))
    (trace,) = read_file(path, ReadOptions())
    seen["calls"] = [[call.op, call.num_bytes] for call in trace.calls]
    # Each recorder has a dump of its own: 2.15's engine feeds the one that is named after it.
    own = seen["engine"].startswith("ProcessGroupNCCL2")
    dump = distributed_c10d._dump_fr_trace_json(backend="nccl2") if own else distributed_c10d._dump_nccl_trace_json()
    path = folder / f"flight_rank_{rank}.json"
    path.write_bytes(dump)
    (trace,) = read_file(path, ReadOptions())
    seen["recorded"] = [[call.op, call.num_bytes, call.num_ranks] for call in trace.calls]
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


main()
