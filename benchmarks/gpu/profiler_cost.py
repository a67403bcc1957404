"""What one measured step costs with PyTorch's profiler: the host's time to start it, to stop it, and to export.

Each line is one process: CUPTI taken down after every use, as PyTorch does by default, and kept (TEARDOWN_CUPTI=0); the
last column is a step in which nothing is profiled, after the first use.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

NUM_MEASURED = 8
NUM_PRODUCTS = 200


def measured() -> None:
    """One process."""
    import torch  # noqa: PLC0415 - only the child needs it
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]

    def step_s() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(NUM_PRODUCTS):
            torch.mm(a, a)
        torch.cuda.synchronize()
        return time.perf_counter() - began

    step_s()
    plain, rows, after = [step_s() for _ in range(20)], [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(NUM_MEASURED):
            began = time.perf_counter()
            seen = profile(activities=activities, acc_events=True)
            seen.__enter__()
            started = time.perf_counter()
            step_s()
            stopping = time.perf_counter()
            seen.__exit__(None, None, None)
            stopped = time.perf_counter()
            seen.export_chrome_trace(str(Path(folder) / "step.json"))
            rows.append((started - began, stopped - stopping, time.perf_counter() - stopped))
            after += [step_s() for _ in range(3)]
    start, stop, export = (median(column) * 1e3 for column in zip(*rows[1:], strict=True))
    print(
        f"TEARDOWN_CUPTI={os.environ.get('TEARDOWN_CUPTI', '-')}: first {sum(rows[0]) * 1e3:.0f} ms;"
        f" start {start:.1f}, stop {stop:.1f}, export {export:.1f} ms;"
        f" step {median(plain) * 1e3:.3f} ms, after {median(after) * 1e3:.3f} ms",
        flush=True,
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measured()
    else:
        for value in (None, "0"):
            environment = {k: v for k, v in os.environ.items() if k != "TEARDOWN_CUPTI"}
            environment |= {} if value is None else {"TEARDOWN_CUPTI": value}
            subprocess.run([sys.executable, __file__, "child"], env=environment, check=True)
