"""What one decision of a tuner plug-in costs: getCollInfo and getChunkSize, with a table of 4,096 entries.

    python benchmarks/decision_cost.py [--plugin liblagom_tuner.so] [--out benchmarks/results] [OTHER.so ...]

The plug-in is built from `csrc/` unless given. Other tuner plug-ins are timed in the same run, in turns with ours; one
that reads NVIDIA's CSV (`NCCL_TUNER_CONFIG_FILE`) is given the same calls. Every call is timed singly with the time
stamp counter, serialised on both sides, less the cost of reading it; the answer is checked, too. Warm: every call site
was asked for before in the same round. Cold: 16 MiB of other data were written before each call.
"""

import argparse
import ctypes
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from lagom_overlap.collective import (  # noqa: E402
    Algorithm,
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigTable,
    Protocol,
)
from lagom_overlap.collective.sites import keys_of  # noqa: E402
from lagom_overlap.nccl_plugin.fake_host import FakeComm, FakeNccl, load_fake_library  # noqa: E402
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator, encode_table, write_table  # noqa: E402

NUM_COMMUNICATORS, NUM_SIZES, NUM_OCCURRENCES = 4, 256, 4
CALLS_PER_ROUND, NUM_WARM_UP, NUM_ROUNDS = 25_000, 15_000, 30
COLD_CALLS, COLD_ROUNDS = 200, 5
COLL_INFO, CHUNK_SIZE, COLD, IN_ORDER = range(4)
MIB = 1 << 20
RING_SIMPLE = (Algorithm.RING, Protocol.SIMPLE)
TARGET_MEDIAN_NS, TARGET_P99_NS = 50.0, 100.0


@dataclass(frozen=True, slots=True)
class Case:
    """One plug-in with its environment and the communicators it decides for."""

    name: str
    comms: list[FakeComm]
    has_rows: bool


def build(folder: Path) -> tuple[Path, Path]:
    """Compiles the plug-in and the fake host with the flags of the wheel."""
    csrc = ROOT / "csrc"
    flags = ["-std=c11", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden"]
    plugin, fake = folder / "liblagom_tuner.so", folder / "libfake_nccl.so"
    for output, sources in (
        (plugin, [*sorted(csrc.glob("lagom_tuner*.c")), *sorted(csrc.glob("lagom_profiler*.c"))]),
        (fake, sorted((csrc / "nccl").glob("nccl_host*.c"))),
    ):
        subprocess.run(["cc", *flags, "-o", output, *sources, "-ldl", "-lm", "-lpthread"], check=True)
    return plugin, fake


def size_of(index: int) -> int:
    """Sizes of 1 MiB and more, which are followed through the step."""
    return MIB * (index + 1)


def write_tables(folder: Path) -> int:
    """Our table and NVIDIA's CSV for the same calls; returns the entries of ours."""
    names = [CommunicatorId(description="bench", ranks=tuple(range(2 + c))) for c in range(NUM_COMMUNICATORS)]
    rows = {
        ConfigKey(communicator=name, kind=CollectiveKind.ALL_REDUCE, num_bytes=size_of(s), occurrence=n): CommConfig(
            algorithm=RING_SIMPLE[0], protocol=RING_SIMPLE[1], num_channels=1 + (s + (n == 1)) % 16, chunk_bytes=65536
        )
        for name in names
        for s in range(NUM_SIZES)
        for n in range(NUM_OCCURRENCES)
    }
    communicators = [ProcessCommunicator(name, 1) for name in names]
    step = [(CollectiveKind.ALL_REDUCE, size_of(s)) for _ in range(NUM_OCCURRENCES) for s in range(NUM_SIZES)]
    table = ConfigTable(rows, cycles={name: keys_of(name, step) for name in names})
    write_table(folder / "table.bin", encode_table(table, generation=1, communicators=communicators).data)
    lines = [
        f"allreduce,{size_of(s)},{size_of(s)},ring,simple,{1 + s % 16},1,{2 + c}"
        for c in range(NUM_COMMUNICATORS)
        for s in range(NUM_SIZES)
    ]
    (folder / "nvidia.csv").write_text("\n".join(lines) + "\n")
    return len(rows)


def open_case(library: ctypes.CDLL, folder: Path, name: str, plugin: Path, env: dict[str, str], *, rows: bool) -> Case:
    """Opens a copy of the plug-in under its own environment, so that no case shares state with another."""
    copy = folder / f"{len(list(folder.glob('copy*')))}-{plugin.name}"
    copy = copy.with_name(f"copy{copy.name}")
    shutil.copy(plugin, copy)
    for key in ("LAGOM_TABLE", "LAGOM_RECORD", "LAGOM_DISABLE", "NCCL_TUNER_CONFIG_FILE"):
        os.environ.pop(key, None)
    os.environ.update({"LAGOM_CHAIN_TUNER": "none", "NCCL_TUNER_PLUGIN": str(copy), **env})
    nccl = FakeNccl(library, "2.30")
    if nccl.tuner_version == 0:
        raise SystemExit(f"{plugin} exports no tuner that NCCL 2.30 knows")
    return Case(f"{name} (v{nccl.tuner_version})", [nccl.comm(2 + c) for c in range(NUM_COMMUNICATORS)], rows)


def check(case: Case) -> None:
    """The answer, before it is timed: a row's channels and chunk, or nothing touched."""
    comm = case.comms[1]
    if case.has_rows:
        channels = [comm.run(CollectiveKind.ALL_REDUCE, size_of(7)).tuner_channels for _ in range(NUM_OCCURRENCES)]
        assert sorted(channels) == [8, 8, 8, 9], channels
        assert set(comm.run(CollectiveKind.ALL_REDUCE, size_of(7)).chunk_bytes) == {65536}
    elif case.name.startswith("lagom"):
        assert comm.run(CollectiveKind.ALL_REDUCE, size_of(7)).is_untouched


def time_round(library: ctypes.CDLL, case: Case, seed: int, timing: int) -> np.ndarray:
    """Nanoseconds of calls at random communicators and sizes."""
    num_calls, num_warm_up = (COLD_CALLS, 0) if timing == COLD else (CALLS_PER_ROUND, NUM_WARM_UP)
    rng = random.Random(seed)
    comms = (ctypes.c_void_p * NUM_COMMUNICATORS)(*(comm._pointer for comm in case.comms))
    places = [(rng.randrange(NUM_COMMUNICATORS), rng.randrange(NUM_SIZES)) for _ in range(num_calls)]
    if timing == IN_ORDER:
        places = [(n % NUM_COMMUNICATORS, n // NUM_COMMUNICATORS % NUM_SIZES) for n in range(num_calls)]
    which = (ctypes.c_uint32 * num_calls)(*(communicator for communicator, _ in places))
    sizes = (ctypes.c_uint64 * num_calls)(*(size_of(size) for _, size in places))
    spent = np.empty(num_calls, np.float32)
    how = COLL_INFO if timing == IN_ORDER else timing
    library.fake_time(comms, which, sizes, num_calls, how, spent.ctypes.data_as(ctypes.c_void_p))
    return spent[num_warm_up:]


def cpu_name() -> str:
    """The processor's name as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def measure(library: ctypes.CDLL, cases: list[Case]) -> list[str]:
    """Markdown rows: all cases in turns, so that a slow moment of the machine hits all of them."""
    rows = []
    for timing, what in (
        (COLL_INFO, "getCollInfo, at random"),
        (IN_ORDER, "getCollInfo, in the step's order"),
        (CHUNK_SIZE, "getChunkSize"),
        (COLD, "getCollInfo, cold"),
    ):
        spent: dict[str, list[np.ndarray]] = {case.name: [] for case in cases}
        for turn in range(COLD_ROUNDS if timing == COLD else NUM_ROUNDS):
            for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
                spent[case.name].append(time_round(library, case, turn, timing))
        for case in cases:
            rounds = np.array(spent[case.name])
            medians = np.median(rounds, axis=1)
            p99 = np.percentile(rounds, 99)
            rows.append(
                f"| {what} | {case.name} | {np.median(rounds):.1f} | {medians.min():.1f} - {medians.max():.1f} |"
                f" {p99:.1f} | {np.percentile(rounds, 99.9):.1f} |"
            )
            if case is cases[0] and timing == IN_ORDER:
                verdict = np.median(rounds) <= TARGET_MEDIAN_NS and p99 <= TARGET_P99_NS
                rows[-1] += " met |" if verdict else " MISSED |"
            else:
                rows[-1] += " |"
    return rows


def main() -> None:
    """Measures, prints and, with --out, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("others", nargs="*", type=Path, help="other tuner plug-ins (.so) to time against ours")
    parser.add_argument("--plugin", type=Path, help="our plug-in; built from csrc/ if left out")
    parser.add_argument("--out", type=Path, help="folder to write the result to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        built, fake = build(folder)
        plugin = arguments.plugin or built
        num_entries = write_tables(folder)
        library = load_fake_library(fake)
        library.fake_time.restype = ctypes.c_double
        library.fake_time.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 2 + [ctypes.c_void_p]
        table, csv = {"LAGOM_TABLE": str(folder / "table.bin")}, {"NCCL_TUNER_CONFIG_FILE": str(folder / "nvidia.csv")}
        record = {**table, "LAGOM_RECORD": str(folder / "record")}
        cases = [
            open_case(library, folder, "lagom, a row for each call", plugin, table, rows=True),
            open_case(library, folder, "lagom, no table", plugin, {}, rows=False),
            open_case(library, folder, "lagom, rows and recording", plugin, record, rows=True),
            *(open_case(library, folder, other.name, other, csv, rows=False) for other in arguments.others),
        ]
        for case in cases:
            check(case)
        rows = measure(library, cases)
    text = "\n".join(
        [
            "# Decision cost of the tuner plug-in",
            "",
            f"{cpu_name()}, {os.cpu_count()} cores (shared, not pinned, frequency not fixed), {platform.system()},"
            f" {date.today().isoformat()}.",
            f"Table of {num_entries} entries: {NUM_COMMUNICATORS} communicators x {NUM_SIZES} sizes x"
            f" {NUM_OCCURRENCES} occurrences; fake NCCL 2.30 host. At random: communicators and sizes, no call where"
            " the step has it; in the step's order: as a job makes them.",
            f"{NUM_ROUNDS} rounds of {CALLS_PER_ROUND - NUM_WARM_UP} calls after {NUM_WARM_UP} untimed ones, all"
            " plug-ins in turns; every call timed singly (time stamp counter, fenced), less the clock's own cost.",
            f"Cold: {COLD_ROUNDS} rounds of {COLD_CALLS} calls, 16 MiB of other data written before each.",
            f"Target: getCollInfo in the step's order, with a row for each call, at most {TARGET_MEDIAN_NS:.0f} ns"
            f" median and {TARGET_P99_NS:.0f} ns at the 99th percentile.",
            "",
            "| call | plug-in | median ns | median per round, min - max | p99 ns | p99.9 ns | target |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            "Command: `python benchmarks/decision_cost.py --out benchmarks/results OTHER.so ...`.",
            "Values are multiples of the counter's step. libnccl-tuner-example and -basic, where listed: NVIDIA/nccl"
            " v2.30.7-1, plugins/tuner, built with gcc -O2; the example reads 1,024 CSV lines for the same calls.",
            "",
        ]
    )
    print(text)
    if arguments.out:
        cpu = "_".join(cpu_name().lower().replace("(r)", "").split())
        path = arguments.out / f"plugin_decision_cost_{cpu}_{date.today().isoformat()}.md"
        path.write_text(text)


if __name__ == "__main__":
    main()
