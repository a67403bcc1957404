"""The NCCL host's decisions against those logged from real NCCL: `python tests/emulated_gpu/nccl_golden.py DATA`.

DATA is a folder with real_default_choice.csv, papers_defaults.csv and papers_graphs.csv, which are not part of the
project.
"""

import csv
import ctypes
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import lagom_overlap
from lagom_emulate.nccl_tables import shape_record, tuner_constants
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost.nccl import CpuVendor, Graph, PathType, Topology
from lagom_overlap.cost.nccl.derived_graphs import NvswitchMachine, nvswitch_topology
from lagom_overlap.nccl_plugin.fake_host import CallOutcome, FakeComm, FakeNccl, load_fake_library
from lagom_overlap.nccl_plugin.table_layout import KINDS

H100 = NvswitchMachine(
    name="h100",
    compute_capability=90,
    cpu_vendor=CpuVendor.INTEL,
    nvlink_bytes_per_s=370.8e9,
    num_nics=1,
    nic_bytes_per_s=1.25e9,
    nic_path=PathType.PHB,
)
FIELDS = ("algorithm", "protocol", "channels", "block", "chunk")
NAMES = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
COLLECTIVES = {kind.value for kind in KINDS}
"""Send, receive and all-to-all have no tuning model."""
CODES = {"2.31.0dev": "2.31.0"}


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that one communicator decides."""

    nccl: str
    gpu: str
    topology: str
    num_ranks: int
    nvls: str


def library() -> Path:
    return next(Path(p) / "lib" / "libfake_nccl.so" for p in lagom_overlap.__path__ if (Path(p) / "lib").is_dir())


def code_of(release: str) -> int:
    major, minor, patch = (int(part) for part in CODES.get(release, release).split("."))
    return major * 10000 + minor * 100 + patch


def pcie_of_two_sockets(num_ranks: int) -> Topology:
    """Four H100 on two sockets without NVLink: the graphs that NCCL printed, not derived."""
    ring = Graph(
        num_channels=2, intra_bytes_per_s=11e9, inter_bytes_per_s=11e9, intra_type=PathType.SYS, same_channels=True
    )
    return Topology(
        name="pcie",
        compute_capability=90,
        cpu_vendor=CpuVendor.INTEL,
        num_nodes=1,
        num_ranks=num_ranks,
        ring=ring,
        tree=replace(ring, intra_bytes_per_s=20e9, inter_bytes_per_s=20e9),
    )


def printed_graphs(row: dict[str, str], graphs: dict[str, dict[str, str]]) -> Topology:
    """A paper's machine with the graphs that NCCL printed for it."""
    g = graphs[row["topology"]]

    def graph(prefix: str) -> Graph:
        intra, inter = g[f"{prefix}_type"].split("/")
        intra_speed = float(g[f"{prefix}_bw_intra"]) * 1e9
        inter_speed = float(g.get(f"{prefix}_bw_inter") or g["ring_bw_inter"]) * 1e9
        return Graph(
            num_channels=int(g[f"{prefix}_search_channels"]),
            intra_bytes_per_s=intra_speed,
            inter_bytes_per_s=inter_speed,
            intra_type=PathType[intra],
            inter_type=PathType[inter],
            same_channels=row["nodes"] == "1",
        )

    amd = row["topology"].endswith("amd") or row["gpu"] == "A100"
    return Topology(
        name=row["topology"],
        compute_capability={"A100": 80, "A40": 86}[row["gpu"]],
        cpu_vendor=CpuVendor.AMD if amd else CpuVendor.INTEL,
        num_nodes=int(row["nodes"]),
        num_ranks=int(row["nranks"]),
        ring=graph("ring"),
        tree=graph("tree"),
        fallback_tree=g["tree_pattern"] == "3",
    )


def topology_of(row: dict[str, str], graphs: dict[str, dict[str, str]]) -> Topology:
    if row["gpu"] != "H100":
        return printed_graphs(row, graphs)
    ranks, nodes = int(row["nranks"]), int(row["nodes"])
    if row["topology"] == "pcie":
        return pcie_of_two_sockets(ranks)
    found = nvswitch_topology(H100, ranks, nodes)
    return found if row["nvls"] == "on" else replace(found, nvls=None)


def compared(row: dict[str, str], outcome: CallOutcome) -> dict[str, tuple[str, str]]:
    """Logged and decided, by field; a field that was not logged is left out."""
    threads = max(outcome.num_threads, 128 if code_of(row["nccl"]) >= 22200 else 96)
    chunk = "|".join(dict.fromkeys(str(b) for b in outcome.chunk_bytes))
    found = {
        "algorithm": outcome.algorithm.value.upper().replace("NVLS_TREE", "NVLSTREE"),
        "protocol": outcome.protocol.value.upper(),
        "channels": str(outcome.num_channels),
        "block": str(threads),
        "chunk": chunk,
    }
    logged = {
        "algorithm": row["algorithm"].replace("NVLS_TREE", "NVLSTREE"),
        "protocol": row["protocol"],
        "channels": row["channels"],
        "block": row["block"],
        "chunk": "|".join(dict.fromkeys(row["chunk_bytes"].split("|"))),
    }
    return {name: (logged[name], found[name]) for name in FIELDS if logged[name]}


def judged(data: Path) -> Iterator[tuple[Group, dict[str, str], dict[str, tuple[str, str]]]]:
    with (data / "papers_graphs.csv").open() as file:
        graphs = {row["topology"]: row for row in csv.DictReader(file)}
    loaded = load_fake_library(library())
    comms: dict[Group, FakeComm] = {}
    for name in ("real_default_choice.csv", "papers_defaults.csv"):
        with (data / name).open() as file:
            for row in csv.DictReader(file):
                if row["collective"] not in COLLECTIVES:
                    continue
                group = Group(row["nccl"], row["gpu"], row["topology"], int(row["nranks"]), row["nvls"])
                if group not in comms:
                    release = CODES.get(group.nccl, group.nccl)
                    nccl = FakeNccl(loaded, code_of(group.nccl))
                    record = shape_record(topology_of(row, graphs), release)
                    comms[group] = nccl.comm_of(record.tobytes(), tuner_constants(release).tobytes())
                outcome = comms[group].run(CollectiveKind(row["collective"]), int(row["bytes"]))
                yield group, row, compared(row, outcome)


def judged_asked(data: Path, tuner: Path) -> Iterator[tuple[Group, dict[str, str], dict[str, tuple[str, str]]]]:
    """The rows of real_asked_and_ran.csv: the same asked of the host by a tuner (asking_tuner.c, compiled)."""
    asking = ctypes.CDLL(str(tuner))
    knobs = {name: ctypes.c_int.in_dll(asking, f"asked_{name}") for name in ("algorithm", "protocol", "channels")}
    chunk = ctypes.c_size_t.in_dll(asking, "asked_chunk")
    loaded = load_fake_library(library())
    os.environ["NCCL_TUNER_PLUGIN"] = str(tuner)
    comms: dict[Group, FakeComm] = {}
    with (data / "real_asked_and_ran.csv").open() as file:
        for row in csv.DictReader(file):
            group = Group(row["nccl"], row["gpu"], row["topology"], int(row["nranks"]), row["nvls"])
            if group not in comms:
                release = CODES.get(group.nccl, group.nccl)
                record = shape_record(topology_of(row, {}), release)
                comms[group] = FakeNccl(loaded, code_of(group.nccl)).comm_of(record.tobytes())
            applied = row["plugin_applied"] == "yes"
            asked = row["asked_algorithm"].replace("NVLSTREE", "NVLS_TREE"), row["asked_protocol"]
            knobs["algorithm"].value = NAMES.index(asked[0]) if applied and asked[0] else -1
            knobs["protocol"].value = ("LL", "LL128", "SIMPLE").index(asked[1]) if applied and asked[1] else -1
            knobs["channels"].value = int(row["plugin_answered_channels"] or 0)
            chunks = set(filter(None, row["plugin_chunk_set"].split("|")))
            chunk.value = int(chunks.pop()) if len(chunks) == 1 else 0
            outcome = comms[group].run(CollectiveKind(row["collective"]), int(row["bytes"]))
            ran = {"algorithm": row["ran_algorithm"], "protocol": row["ran_protocol"], "channels": row["ran_channels"]}
            yield group, row, compared(row | ran | {"chunk_bytes": row["ran_chunk_bytes"]}, outcome)


def main(data: Path, only: str = "", most_lines: str = "0", tuner: str = "") -> None:
    counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    wrong = []
    for group, row, fields in judged_asked(data, Path(tuner)) if tuner else judged(data):
        if only not in f"{group.nccl}/{group.topology}":
            continue
        key = (group.nccl, group.topology, row["collective"])
        counts[key]["rows"] += 1
        for name, (logged, found) in fields.items():
            counts[key][f"{name} of"] += 1
            counts[key][name] += logged == found
            if logged != found:
                wrong.append((*key, row["nranks"], group.nvls, row["bytes"], name, logged, found))
    total: Counter[str] = sum(counts.values(), Counter())
    for key, count in (*sorted(counts.items()), (("all",), total)):
        shares = "  ".join(f"{name} {count[name]}/{count[f'{name} of']}" for name in FIELDS)
        sys.stdout.write(f"{' '.join(key)}: rows {count['rows']}  {shares}\n")
    for line in wrong[: int(most_lines)]:
        sys.stdout.write(" ".join(line) + "\n")


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        main(Path(sys.argv[1]), *sys.argv[2:])
