"""How fast and in how much memory `lagom analyze` reads a trace, against json.loads and, if given, HTA.

    python benchmarks/analyze_speed.py TRACE... [--make EVENTS] [--hta PYTHON] [--repeats N] [--json]

A TRACE is a file, or a folder with one file per rank. Every measurement is a process of its own, the contenders in turn
on each trace. Of each process: wall and CPU time from its start to its answer, imports included; the peak of its
resident memory above that of an interpreter that does nothing; and the CPU time of the same work done a second time in
the same process, when everything is imported ("work"). Of processes that a contender starts the CPU time counts, and
the peak of the largest. "floor" unpacks, and decodes every event into as little as `lagom analyze` does, nothing else.
`--make N` writes a synthetic trace of about N events into a temporary folder and adds it. `--hta` names a Python that
has HolisticTraceAnalysis installed; it runs its overlap and temporal breakdown on the same files. The answers are
compared: our HTA-compatible figures must equal HTA's.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_MEASURE = """
import resource, sys, time
def cpu():
    own, theirs = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + theirs.ru_utime + theirs.ru_stime
def peak():  # not ru_maxrss, which begins with what the parent had
    with open("/proc/self/status") as status:
        own = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return 1024 * max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
path, began = sys.argv[1], float(sys.argv[2])
{imports}
{work}
wall_s, cpu_s, peak_bytes = time.time() - began, cpu(), peak()
{work}
work_cpu_s = cpu() - cpu_s
import json
print(json.dumps({{"wall_s": wall_s, "cpu_s": cpu_s, "work_cpu_s": work_cpu_s, "peak_bytes": peak_bytes,
    "answer": answer}}))
"""
_FILES = (
    "from pathlib import Path\n"
    "held = Path(path)\n"
    "files = sorted(p for p in held.iterdir() if p.name.endswith(('.json', '.gz'))) if held.is_dir() else [held]\n"
)
_CODE = {
    "bare": ("", "answer = 0"),
    "json.loads": (
        "import gzip, json\n" + _FILES,
        "answer = 0\n"
        "for file in files:\n"
        "    data = file.read_bytes()\n"
        "    data = gzip.decompress(data) if data[:2] == b'\\x1f\\x8b' else data\n"
        "    answer += len(json.loads(data)['traceEvents'])",
    ),
    "floor": (
        "from lagom_overlap.trace.chrome_reader import EventReader\n"
        "from lagom_overlap.trace.files import open_streams\n"
        "from lagom_overlap.trace.usual_events import USUAL_EVENTS\n" + _FILES,
        "answer = 0\n"
        "def count(block):\n"
        "    global answer\n"
        "    try:\n"
        "        answer += len(USUAL_EVENTS.decode(block))\n"
        "    except Exception:\n"
        "        return False\n"
        "    return True\n"
        "for file in files:\n"
        "    with open_streams(file) as streams:\n"
        "        for stream in streams:\n"
        "            answer += sum(map(len, EventReader(stream).blocks(count)))",
    ),
    "lagom analyze": (
        "import os\nos.environ.setdefault('OPENBLAS_NUM_THREADS', '1')  # as the command does\n"
        "from pathlib import Path\nfrom lagom_overlap.verbs.analyze import AnalyzeRequest, Compat, run_analyze",
        "found = run_analyze(AnalyzeRequest(traces=(Path(path),), compat=Compat.HTA)).ranks\n"
        "answer = sorted([[r.overlap_pct, round(r.idle_s * 1e6), round(r.compute_s * 1e6)] for r in found])",
    ),
    "HTA": (
        "import logging, warnings\nlogging.disable(logging.CRITICAL)\nwarnings.simplefilter('ignore')\n"
        "from hta.trace_analysis import TraceAnalysis\n" + _FILES,
        "hta = TraceAnalysis(trace_files=dict(enumerate(map(str, files))), trace_dir='/')\n"
        "overlap = hta.get_comm_comp_overlap(visualize=False)\n"
        "parts = hta.get_temporal_breakdown(visualize=False)\n"
        "rows = zip(overlap.iloc[:, 1], parts['idle_time(us)'], parts['compute_time(us)'])\n"
        "answer = sorted([[float(a), int(b), int(c)] for a, b, c in rows])",
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
    """Medians, spreads and the answer of some runs."""
    imports, work = _CODE[what]
    code = _MEASURE.format(imports=imports, work=work)
    runs = []
    for _ in range(repeats):
        command = [python, "-c", code, str(path), str(time.time())]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {"what": what, "failed": done.stderr.strip().splitlines()[-1:]}
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    found: dict[str, object] = {"what": what, "answer": runs[0]["answer"]}
    for name in ("wall_s", "cpu_s", "work_cpu_s", "peak_bytes"):
        values = [run[name] for run in runs]
        found[name] = statistics.median(values)
        found[f"{name}_spread"] = max(values) - min(values)
    return found


def size_of(path: Path) -> int:
    """Bytes of a file, or of a folder's files."""
    return sum(p.stat().st_size for p in path.iterdir()) if path.is_dir() else path.stat().st_size


def run_file(path: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """All measurements of one trace."""
    contenders = [(what, arguments.hta if what == "HTA" else sys.executable) for what in _CODE]
    rows = {what: measure(what, path, python, arguments.repeats) for what, python in contenders if python}
    ours, theirs, bare = rows["lagom analyze"], rows.get("HTA", {}), rows["bare"]
    found: dict[str, object] = {"file": path.name, "file_bytes": size_of(path), "rows": list(rows.values())}
    if "answer" in theirs and "answer" in ours:
        if ours["answer"] != theirs["answer"]:
            raise SystemExit(f"{path.name}: our HTA figures {ours['answer']} are not HTA's {theirs['answer']}")
        for name in ("wall_s", "cpu_s", "work_cpu_s"):
            found[f"times_faster_{name}"] = theirs[name] / ours[name]  # type: ignore[operator]
        memory = [row["peak_bytes"] - bare["peak_bytes"] for row in (ours, theirs)]  # type: ignore[operator]
        found["share_of_memory"] = memory[0] / memory[1]
    return found


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
        show(held)


def show(held: dict[str, object]) -> None:
    """One trace's table."""
    print(f"{held['file']} ({held['file_bytes'] / 1e6:.1f} MB)")
    for row in held["rows"]:
        if "failed" in row:
            print(f"  {row['what']:14} failed: {row['failed']}")
            continue
        print(
            f"  {row['what']:14} wall {row['wall_s']:7.3f} s (spread {row['wall_s_spread']:.3f}), "
            f"CPU {row['cpu_s']:7.3f} (spread {row['cpu_s_spread']:.3f}), work {row['work_cpu_s']:7.3f} "
            f"(spread {row['work_cpu_s_spread']:.3f}), peak {row['peak_bytes'] / 2**20:6.1f} MiB"
        )
    if "share_of_memory" in held:
        print(
            f"  against HTA: {held['times_faster_work_cpu_s']:.1f} times faster (work), "
            f"{held['times_faster_cpu_s']:.1f} (process, CPU), {held['times_faster_wall_s']:.1f} (process, wall), "
            f"{held['share_of_memory']:.2f} of its memory above the bare interpreter"
        )


if __name__ == "__main__":
    main()
