"""How fast and in how much memory `lagom analyze` reads and judges a trace, beside json.loads and, if given, HTA.

    python benchmarks/analyze_speed.py TRACE... [--make EVENTS] [--hta PYTHON] [--repeats N] [--json]

Every measurement is a process of its own: wall and CPU time of the work without the interpreter's start and imports
(on a busy machine the CPU time is the fairer one), and the peak of resident memory less that of the process just before
the work; then ("process") CPU time and peak of the whole process, imports included. `--make N` writes a synthetic trace
of about N events into a temporary folder and adds it. `--hta` names a Python that has HolisticTraceAnalysis installed;
it runs its overlap and temporal breakdown on the same file. The answers are compared: our HTA-compatible figures must
equal HTA's.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_MEASURE = """
import json, resource, sys, time
def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
path = sys.argv[1]
{imports}
before = memory()
start, cpu = time.perf_counter(), time.process_time()
{work}
took, cpu = time.perf_counter() - start, time.process_time() - cpu
print(json.dumps({{"seconds": took, "cpu_s": cpu, "memory_bytes": memory() - before, "answer": answer,
    "process_cpu_s": time.process_time(), "peak_bytes": memory()}}))
"""
_CODE = {
    "json.loads": (
        "import gzip",
        "data = open(path, 'rb').read()\n"
        "data = gzip.decompress(data) if data[:2] == b'\\x1f\\x8b' else data\n"
        "answer = len(json.loads(data)['traceEvents'])",
    ),
    "lagom read": (
        "from pathlib import Path\nfrom lagom_overlap.trace.reading import read_traces",
        "answer = sum(len(trace.events) for trace in read_traces([Path(path)]))",
    ),
    "lagom analyze": (
        "from pathlib import Path\nfrom lagom_overlap.job.analyze import AnalyzeRequest, Compat, run_analyze",
        "found = run_analyze(AnalyzeRequest(traces=(Path(path),), compat=Compat.HTA)).json.ranks[0]\n"
        "answer = [found.overlap_pct, round(found.idle_s * 1e6), round(found.compute_s * 1e6)]",
    ),
    "HTA": (
        "import logging, warnings\nlogging.disable(logging.CRITICAL)\nwarnings.simplefilter('ignore')\n"
        "from hta.trace_analysis import TraceAnalysis",
        "hta = TraceAnalysis(trace_files={0: path}, trace_dir='/')\n"
        "overlap = hta.get_comm_comp_overlap(visualize=False)\n"
        "parts = hta.get_temporal_breakdown(visualize=False)\n"
        "answer = [float(overlap.iloc[0, 1]), int(parts['idle_time(us)'][0]), int(parts['compute_time(us)'][0])]",
    ),
}


def make_trace(path: Path, num_events: int) -> None:
    """A synthetic FSDP-like trace: per kernel a CPU operator, a launch, two flow events and a Python frame."""
    rng = random.Random(1)
    names = [f"void at::native::elementwise_kernel_{n}<float, {'x' * (40 + n % 80)}>(float*, int)" for n in range(200)]
    stack = ";".join(f"model/layers/block_{n}.py({100 + n}): forward_{n}" for n in range(12))
    with path.open("w", encoding="utf-8") as file:
        file.write('{"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100", "numSms": 132}],\n')
        file.write('"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8, "nccl_version": "2.27.5"},\n')
        file.write('"baseTimeNanoseconds": 1700000000000000000, "traceEvents": [\n')
        at, comm_until = 1000.0, 0.0
        for n in range(num_events // 6):
            corr, length = n + 1, rng.uniform(3, 60)
            shape = f"[[{rng.choice((512, 1024, 4096))}, 4096], []]"
            rows = [
                f'{{"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 9, "tid": 9, "ts": {at - 30:.3f},'
                ' "dur": 9.125,'
                f' "args": {{"External id": {corr + 10**7}, "Record function id": 0,'
                f' "Concrete Inputs": ["", "1"],'
                f' "Input type": ["float", "Scalar"], "Input Strides": [[4096, 1], []], "Input Dims": {shape},'
                f' "Sequence number": {n}, "Fwd thread id": 0, "Call stack": "{stack}",'
                f' "Ev Idx": {n}}}}}',
                f'{{"ph": "X", "cat": "python_function", "name": "torch/nn/modules/module.py(1553): _call_impl",'
                f' "pid": 9, "tid": 9, "ts": {at - 40:.3f}, "dur": 25.5, "args": {{"Python parent id": {n},'
                f' "Python id": {n + 1}, "Ev Idx": {n}}}}}',
                f'{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9,'
                f' "ts": {at - 20:.3f}, "dur": 6.5, "args": {{"External id": {corr + 10**7}, "cbid": 211,'
                f' "correlation": {corr}}}}}',
                f'{{"ph": "s", "id": {corr}, "pid": 9, "tid": 9, "ts": {at - 20:.3f}, "cat": "ac2g", "name": "ac2g"}}',
                f'{{"ph": "f", "id": {corr}, "pid": 0, "tid": 7, "ts": {at:.3f}, "cat": "ac2g", "name": "ac2g",'
                ' "bp": "e"}',
            ]
            if n % 400 == 0:
                rows.append(
                    f'{{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{n // 400}", "pid": 9, "tid": 9,'
                    f' "ts": {at - 45:.3f}, "dur": 9000.0, "args": {{"Ev Idx": {n}}}}}'
                )
            is_comm = n % 40 == 20 and at > comm_until
            name = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)" if is_comm else names[n % 200]
            fields = (
                ', "Collective name": "_allgather_base", "In msg nelems": 1048576, "Out msg nelems": 8388608,'
                ' "Group size": 8, "dtype": "BFloat16", "Process Group Name": "1", "Process Group Description": "fsdp"'
                if is_comm
                else ""
            )
            rows.append(
                f'{{"ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": {20 if is_comm else 7},'
                f' "ts": {at:.3f}, "dur": {length * (20 if is_comm else 1):.3f},'
                f' "args": {{"External id": {corr + 10**7},'
                f' "queued": 0, "device": 0, "context": 1, "stream": {20 if is_comm else 7}, "correlation": {corr},'
                f' "registers per thread": 32, "shared memory": 0, "blocks per SM": 7.5, "warps per SM": 60.1,'
                f' "grid": [{16 if is_comm else 1024}, 1, 1], "block": [256, 1, 1],'
                f' "est. achieved occupancy %": 90{fields}}}}}'
            )
            file.write((",\n" if n else "") + ",\n".join(rows))
            if is_comm:
                comm_until = at + length * 20
            else:
                at += length + rng.uniform(0, 2)
        file.write("\n]}\n")


def measure(what: str, path: Path, python: str, repeats: int) -> dict[str, object]:
    """Median seconds, median memory and the answer of some runs."""
    imports, work = _CODE[what]
    code = _MEASURE.format(imports=imports, work=work)
    runs = []
    for _ in range(repeats):
        done = subprocess.run([python, "-c", code, str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            return {"what": what, "failed": done.stderr.strip().splitlines()[-1:]}
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    seconds = [run["seconds"] for run in runs]
    return {
        "what": what,
        "seconds": statistics.median(seconds),
        "spread_s": max(seconds) - min(seconds),
        "cpu_s": statistics.median(run["cpu_s"] for run in runs),
        "cpu_spread_s": max(run["cpu_s"] for run in runs) - min(run["cpu_s"] for run in runs),
        "memory_bytes": statistics.median(run["memory_bytes"] for run in runs),
        "process_cpu_s": statistics.median(run["process_cpu_s"] for run in runs),
        "peak_bytes": statistics.median(run["peak_bytes"] for run in runs),
        "answer": runs[0]["answer"],
    }


def run_file(path: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """All measurements of one file."""
    kinds = [(what, sys.executable) for what in _CODE if what != "HTA"]
    if arguments.hta:
        kinds.append(("HTA", arguments.hta))
    rows = [measure(what, path, python, arguments.repeats) for what, python in kinds]
    ours = next(row for row in rows if row["what"] == "lagom analyze")
    theirs = next((row for row in rows if row["what"] == "HTA" and "answer" in row), None)
    if theirs is not None and ours.get("answer") != theirs["answer"]:
        raise SystemExit(f"{path.name}: our HTA figures {ours.get('answer')} are not HTA's {theirs['answer']}")
    return {"file": path.name, "file_bytes": path.stat().st_size, "rows": rows}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--make", type=int, metavar="EVENTS")
    parser.add_argument("--hta", metavar="PYTHON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        traces = list(arguments.traces)
        if arguments.make:
            traces.append(Path(folder) / f"made_{arguments.make}.json")
            make_trace(traces[-1], arguments.make)
        found = [run_file(path, arguments) for path in traces]
    if arguments.json:
        print(json.dumps(found))
        return
    for held in found:
        size = held["file_bytes"]
        print(f"{held['file']} ({size / 1e6:.1f} MB)")
        for row in held["rows"]:
            if "failed" in row:
                print(f"  {row['what']:14} failed: {row['failed']}")
                continue
            print(
                f"  {row['what']:14} {row['seconds']:8.3f} s (spread {row['spread_s']:.3f}), CPU {row['cpu_s']:.3f}"
                f" (spread {row['cpu_spread_s']:.3f}), process {row['process_cpu_s']:.2f} s"
                f" {row['peak_bytes'] / 2**20:.0f} MiB"
                f" {size / row['seconds'] / 1e6:7.1f} MB/s {row['memory_bytes'] / 2**20:8.1f} MiB  {row['answer']}"
            )


if __name__ == "__main__":
    main()
