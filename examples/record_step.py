"""Records steps of a program with PyTorch's profiler, for `lagom plan JOB --times TRACE`.

    torchrun --nproc-per-node 2 examples/record_step.py examples/plan_zero.py trace.json

Rank 0 writes its trace. Shapes are recorded, so that operators are known by more than their name.
"""

import runpy
import sys
import time

import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

WARM_UP, RECORDED = 2, 3


def main(program, trace, function="step"):
    """Runs the steps on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step, inputs = runpy.run_path(program)[function]()
    plan = schedule(wait=0, warmup=WARM_UP, active=RECORDED, repeat=1)

    def write(profiler):
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(trace)

    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan, on_trace_ready=write
    ) as profiler:
        for _ in range(WARM_UP + RECORDED):
            step(*inputs)
            dist.barrier()
            profiler.step()
    dist.destroy_process_group()
    time.sleep(0.1)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)


if __name__ == "__main__":
    main(*sys.argv[1:])
