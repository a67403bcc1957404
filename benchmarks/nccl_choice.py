"""How often our reading of NCCL's tuning model chooses as NCCL itself does, on its golden outputs.

The golden files hold, per synthetic topology, the graphs that NCCL's search found and, per collective and size, what
its model then chose. Three comparisons:

1. choice: graphs as given; algorithm, protocol, channels, threads and predicted time of every row;
2. table: graphs as given; every latency and bandwidth that NCCL prints;
3. preset: graphs derived from link speeds alone (machines with an NVSwitch), the rows again.

    python benchmarks/nccl_choice.py [FOLDER] [--json]

FOLDER holds nccl_*.txt; default: nccl_golden in $LAGOM_DATA, ../shared/data or the cache (`lagom reproduce data`).
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from collective_time import DGX_A100, DGX_H100
from lagom_overlap.collective import Algorithm, Collective, CollectiveKind, Protocol
from lagom_overlap.cost.nccl import CpuVendor, Graph, PathType, Topology, candidates, choose
from lagom_overlap.cost.nccl.derived_graphs import nvswitch_topology
from lagom_overlap.papers.reproduce.datasets import data_roots

TARGET = 0.95
KINDS = {
    "AllReduce": CollectiveKind.ALL_REDUCE,
    "AllGather": CollectiveKind.ALL_GATHER,
    "ReduceScatter": CollectiveKind.REDUCE_SCATTER,
}
ALGORITHMS = {
    "Tree": Algorithm.TREE,
    "Ring": Algorithm.RING,
    "NVLS": Algorithm.NVLS,
    "NVLSTree": Algorithm.NVLS_TREE,
    "PAT": Algorithm.PAT,
}
PROTOCOLS = {"LL": Protocol.LL, "LL128": Protocol.LL128, "Simple": Protocol.SIMPLE}
UNITS = {"K": 1024, "M": 1024**2}
HEADER = re.compile(r"#* ?xml/(\S+)\.xml nNodes=(\d+) nRanks=(\d+) cc=(\d+) cpuVendor=(\d)")
GRAPH = re.compile(
    r"graph id (\d) pattern (\d) nChannels (\d+) bwIntra (\S+) bwInter (\S+) "
    r"typeIntra (\S+) typeInter (\S+) same (\d) crossNic \d latInter (\S+)"
)
TABLE = re.compile(r"(\w+)/(\w+) lat (\S+) bw ([\d.]+)")
SIZE_ROW = re.compile(r"\s+(\d+)KB (\w+)/(\w+) NC=(\d+) NT=(\d+) t=([\d.]+)us")
CHANGE = re.compile(r"(\d+)([KM]):(\w+)/(\w+) nc(\d+) nt(\d+);")
MACHINES = {
    ("a100", "amd"): replace(DGX_A100, name="a100"),
    ("h100", "intel"): replace(DGX_H100, name="h100"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One golden choice."""

    topology: str
    collective: Collective
    algorithm: Algorithm
    protocol: Protocol
    num_channels: int
    num_threads: int
    seconds: float | None


def _topology(header: re.Match[str], block: str) -> Topology:
    graphs, patterns = {}, {}
    for found in GRAPH.finditer(block):
        patterns[found[1]] = int(found[2])
        if int(found[3]):
            graphs[found[1]] = Graph(
                num_channels=int(found[3]),
                intra_bytes_per_s=float(found[4]) * 1e9,
                inter_bytes_per_s=float(found[5]) * 1e9,
                intra_type=PathType[found[6]],
                inter_type=PathType[found[7]],
                same_channels=found[8] == "1",
                inter_latency_s=float(found[9]) * 1e-6,
            )
    return Topology(
        name=f"{header[1]}, {header[2]} nodes",
        compute_capability=int(header[4]),
        cpu_vendor={"1": CpuVendor.INTEL, "2": CpuVendor.AMD}[header[5]],
        num_nodes=int(header[2]),
        num_ranks=int(header[3]),
        ring=graphs["0"],
        tree=graphs["1"],
        nvls=graphs.get("3"),
        fallback_tree=patterns["1"] == 3,
    )


def blocks(path: Path) -> Iterator[tuple[re.Match[str], str]]:
    """The parts of a golden file, each with the header of its topology."""
    text = path.read_text(encoding="utf-8")
    heads = list(HEADER.finditer(text))
    for here, after in zip(heads, [*heads[1:], None], strict=True):
        yield here, text[here.end() : after.start() if after else None]


def size_rows(name: str, num_ranks: int, block: str) -> Iterator[Row]:
    """The rows of one topology: one per collective and size."""
    kind = None
    for line in block.splitlines():
        if line.rstrip(":") in KINDS:
            kind = KINDS[line.rstrip(":")]
        elif kind and (found := SIZE_ROW.match(line)):
            collective = Collective(kind, int(found[1]) * 1024, num_ranks)
            choice = ALGORITHMS[found[2]], PROTOCOLS[found[3]], int(found[4]), int(found[5])
            yield Row(name, collective, *choice, float(found[6]) * 1e-6)


def change_rows(name: str, num_ranks: int, block: str) -> Iterator[Row]:
    """The rows of one topology: the sizes at which the choice changes."""
    for line in block.splitlines():
        kind = KINDS.get(line.strip().partition(":")[0])
        if kind is not None:
            for found in CHANGE.finditer(line):
                collective = Collective(kind, int(found[1]) * UNITS[found[2]], num_ranks)
                choice = ALGORITHMS[found[3]], PROTOCOLS[found[4]], int(found[5]), int(found[6])
                yield Row(name, collective, *choice, None)


def compare(rows: list[Row], topologies: dict[str, Topology]) -> dict[str, object]:
    """How many rows agree in what, and the rows that do not."""
    exact = with_threads = 0
    errors, misses = [], []
    for row in rows:
        ours = choose(row.collective, topologies[row.topology])
        config = ours.config
        key = config.algorithm, config.protocol, config.num_channels
        same = key == (row.algorithm, row.protocol, row.num_channels)
        exact += same
        with_threads += same and config.num_threads == row.num_threads
        if row.seconds:
            errors.append(abs(ours.seconds / row.seconds - 1))
        if not same:
            misses.append(
                f"{row.topology}: {row.collective.kind} {row.collective.num_bytes} B: "
                f"NCCL {row.algorithm}/{row.protocol} {row.num_channels}, ours {key[0]}/{key[1]} {key[2]}"
            )
    return {
        "num_rows": len(rows),
        "identical": exact,
        "identical_with_threads": with_threads,
        "share": exact / len(rows) if rows else 0.0,
        "max_time_error_pct": 100 * max(errors, default=0.0),
        "mean_time_error_pct": 100 * sum(errors) / max(1, len(errors)),
        "misses": misses,
    }


def compare_tables(path: Path, topologies: dict[str, Topology]) -> dict[str, object]:
    """Every latency and bandwidth that NCCL prints (one decimal), against ours."""
    checked, off = 0, []
    for header, block in blocks(path):
        topology = topologies[f"{header[1]}, {header[2]} nodes"]
        for line in block.splitlines():
            kind = KINDS.get(line.split(" ")[0])
            if kind is None:
                continue
            ours = {
                (c.algorithm, c.protocol): c for c in candidates(Collective(kind, 1024, topology.num_ranks), topology)
            }
            theirs = {(ALGORITHMS[m[1]], PROTOCOLS[m[2]]): (float(m[3]), float(m[4])) for m in TABLE.finditer(line)}
            for key in theirs.keys() | ours.keys():
                checked += 1
                mine = ours.get(key)
                if key not in theirs or mine is None:
                    off.append(f"{topology.name} {kind} {key}: only one of us has it")
                elif abs(mine.latency_s * 1e6 - theirs[key][0]) > 0.051 or (
                    abs(mine.bytes_per_s / 1e9 - theirs[key][1]) > 0.051
                ):
                    off.append(f"{topology.name} {kind} {key}: {mine} against {theirs[key]}")
    return {"num_entries": checked, "identical": checked - len(off), "misses": off}


def derived(topologies: dict[str, Topology]) -> tuple[dict[str, Topology], list[str]]:
    """Topologies derived from link speeds, for those with an NVSwitch; which graphs differ from the search's."""
    made, differing = {}, []
    for name, given in topologies.items():
        machine = MACHINES.get((name[:4], given.cpu_vendor.value if name[:4] == "a100" else "intel"))
        if machine is None:
            continue
        machine = replace(machine, cpu_vendor=given.cpu_vendor)
        made[name] = nvswitch_topology(machine, given.num_ranks, given.num_nodes)
        for graph in ("ring", "tree", "nvls"):
            mine, theirs = getattr(made[name], graph), getattr(given, graph)
            numbers = [
                None if g is None else (g.num_channels, g.intra_bytes_per_s, g.inter_bytes_per_s)
                for g in (mine, theirs)
            ]
            if numbers[0] != numbers[1]:
                differing.append(f"{name}: {graph} {numbers[0]}, NCCL's search {numbers[1]}")
    return made, differing


def find_folder(given: Path | None) -> Path | None:
    """The folder of the golden files, or None."""
    roots = data_roots()
    places = [given] if given else [root / "nccl_golden" for root in roots]
    return next((place for place in places if place.is_dir() and list(place.glob("nccl_*.txt"))), None)


def main() -> int:
    """Compare and print; exit code 1 if the target is missed, 2 if the data is absent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = find_folder(args.folder)
    if folder is None:
        print("no golden files: give a folder with nccl_*.txt, or set LAGOM_DATA to its parent", file=sys.stderr)
        return 2
    (graphs,), (sizes,), (changes,) = (
        list(folder.glob(pattern)) for pattern in ("nccl_graphs*.txt", "nccl_model_per_size*.txt", "nccl_default*.txt")
    )
    topologies = {}
    for header, block in blocks(graphs):
        topology = _topology(header, block)
        topologies[topology.name] = topology
    rows = {"per size": [], "changes": []}
    for label, path, reader in (("per size", sizes, size_rows), ("changes", changes, change_rows)):
        for header, block in blocks(path):
            rows[label] += reader(f"{header[1]}, {header[2]} nodes", int(header[3]), block)
    made, differing = derived(topologies)
    result = {
        "num_topologies": len(topologies),
        "per_size": compare(rows["per size"], topologies),
        "changes": compare(rows["changes"], topologies),
        "tables": compare_tables(graphs, topologies),
        "from_presets": {
            "num_topologies": len(made),
            "graphs_that_differ": differing,
            **compare([row for row in rows["per size"] if row.topology in made], made),
        },
    }
    if args.json:
        print(json.dumps(result))
    else:
        report(result)
    return 0 if min(result["per_size"]["share"], result["changes"]["share"]) >= TARGET else 1


def report(result: dict) -> None:
    """Print the comparison for people."""
    print(f"{result['num_topologies']} topologies; identical = algorithm, protocol and channels")
    for label in ("per_size", "changes", "from_presets"):
        part = result[label]
        print(
            f"{label:13} {part['identical']:5} of {part['num_rows']} identical ({100 * part['share']:.2f} %), "
            f"{part['identical_with_threads']} with threads; time off by {part['mean_time_error_pct']:.2f} % mean, "
            f"{part['max_time_error_pct']:.2f} % most"
        )
        for miss in part["misses"]:
            print("   ", miss)
    tables = result["tables"]
    print(f"tables        {tables['identical']:5} of {tables['num_entries']} latencies and bandwidths identical")
    for miss in tables["misses"] + result["from_presets"]["graphs_that_differ"]:
        print("   ", miss)


if __name__ == "__main__":
    sys.exit(main())
