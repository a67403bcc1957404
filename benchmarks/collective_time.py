"""How well two numbers per link predict measured collective times at sizes that the fit has not seen.

Reads, as they are published:

- vidur's profiles (CSV with time_stats.<collective>.median in ms; bytes in `size`, or num_tokens x n_embd x 2);
- vTrain's all-reduce tables (AR_GPU<n>_..., nccl-tests columns, ns).

Every (file, ranks, nodes) is a system with its own link. The split is fixed beforehand: sizes of 1 MiB and more fall
into quarter octaves; the fit sees the even ones, errors are over the odd ones, every distinct size counting once.

The topology decides what NCCL chooses. It is given for the systems that we know; for others every topology with the
right ranks is tried, and the one with the least error on the sizes that the fit sees is taken and named with a "?"
(`--topology` forces one).

    python benchmarks/collective_time.py [FILE_OR_FOLDER ...] [--topology NAME] [--split alternate] [--json]

The last column is the price that group search, steps and planners share, on the presets of the machines that we know.

Without arguments: vidur/ and validation/vtrain_a100_allreduce_lut/ in the folders of `lagom reproduce data`
($LAGOM_DATA, ../shared/data next to the checkout, the cache).
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.cost.nccl import CpuVendor, PathType, Topology, choose, load_topology, topology_names
from lagom_overlap.cost.nccl.derived_graphs import NvswitchMachine, nvswitch_topology, pcie_topology
from lagom_overlap.cost.nccl.wire import wire_terms
from lagom_overlap.errors import LagomError
from lagom_overlap.hardware import load_preset
from lagom_overlap.papers.reproduce.datasets import data_roots
from lagom_overlap.units import MS
from link_fit import LinkFit, Measurement, fit_link, is_held_out
from measured_limits import check_possible, collective_floor_s
from measured_rows import (
    TIME_MS,
    BadFileError,
    BadRowError,
    Named,
    Row,
    decimal,
    one_line,
    read,
    report_named,
    tried,
)

MIN_BYTES = 1024**2
TARGET_PCT = 5.0
SPLITS = {
    "bands": "sizes >= 1 MiB; fitted on even quarter octaves, errors on odd ones",
    "alternate": "sizes >= 1 MiB; fitted on every other size, errors on the rest",
}
VIDUR_TIME = re.compile(r"time_stats\.(\w+)\.median")
VTRAIN_NAME = re.compile(r"AR_GPU(\d{1,4})_", re.ASCII)
MOST_RANKS = 1024
DGX_A100 = NvswitchMachine(
    name="dgx_a100",
    compute_capability=80,
    cpu_vendor=CpuVendor.AMD,
    nvlink_bytes_per_s=240e9,
    num_nics=8,
    nic_bytes_per_s=24e9,
)
DGX_H100 = NvswitchMachine(
    name="dgx_h100",
    compute_capability=90,
    cpu_vendor=CpuVendor.INTEL,
    nvlink_bytes_per_s=370.8e9,
    num_nics=8,
    nic_bytes_per_s=48e9,
)
REQUIRED = {
    "a40_allreduce 2x1": 2,
    "a40_allreduce 4x1": 4,
    "a40_allreduce 8x1": 8,
    "a100_dgx_allreduce 8x1": 8,
    "h100_dgx_allreduce 8x1": 8,
}
"""The systems of the project's target, and vTrain's tables."""
PRESETS = {
    "a40_allreduce": "a40_bridged",
    "a100_dgx_allreduce": "a100_dgx",
    "vtrain_a100": "a100_dgx",
    "h100_dgx_allreduce": "h100_dgx",
}
"""The cluster presets of the machines that we know."""


@dataclass(frozen=True, slots=True)
class System:
    """One measured system: seconds by size."""

    name: str
    source: str
    kind: CollectiveKind
    num_ranks: int
    num_nodes: int
    seconds: dict[int, float]


VTRAIN_COLUMNS = ("size", "count", "type", "time_ns", "busbw", "in_place_ns", "in_place_busbw")
"""nccl-tests' header names times and bandwidths twice: out of place, then in place."""


def read_vidur(path: Path) -> list[System]:
    """The systems of one of vidur's files; where a size occurs more than once, the median."""
    header, rows, named = read(path, ("num_workers",))
    found = [match for name in header if (match := VIDUR_TIME.fullmatch(name))]
    if len(found) != 1 or found[0][1] not in list(CollectiveKind):
        raise BadFileError(f"{str(path)!r} has no single column time_stats.<collective>.median")
    column, kind = found[0][0], CollectiveKind(found[0][1])

    def told(row: Row) -> tuple[int, int, int, float] | None:
        sizes = [row.text(name) for name in (("size",) if row.text("size") else ("n_embd", "num_tokens"))]
        if "0" in sizes:  # nothing is sent
            return None
        num_bytes = row.count("size") or 2 * row.needed_count("n_embd") * row.needed_count("num_tokens")
        if num_bytes < MIN_BYTES:
            return None
        ranks = row.needed_count("num_workers")
        per_node = row.needed_count("devices_per_node", ranks)
        if ranks < 2 or ranks % per_node:
            raise BadRowError(f"{ranks} workers, must be at least 2 and a multiple of devices_per_node = {per_node}")
        if not row.text(column):
            raise BadRowError(f"{column} is not printed")
        seconds = decimal(row.text(column), column, TIME_MS) * MS
        check_possible(column, seconds, collective_floor_s(num_bytes, ranks), kind)
        return ranks, ranks // per_node, num_bytes, seconds

    times = defaultdict(lambda: defaultdict(list))
    tries = [tried(row, told) for row in rows]
    for ranks, nodes, num_bytes, seconds in (one for one in tries if isinstance(one, tuple)):
        times[ranks, nodes][num_bytes].append(seconds)
    report_named(path, [*named, *(one for one in tries if isinstance(one, Named))], num_judged=len(rows))
    return [
        System(
            f"{path.stem} {ranks}x{nodes}",
            path.stem,
            kind,
            ranks,
            nodes,
            {size: median(found[size]) for size in sorted(found)},
        )
        for (ranks, nodes), found in sorted(times.items())
    ]


def read_vtrain(path: Path) -> list[System]:
    """The system of one of vTrain's tables (out of place)."""
    number = VTRAIN_NAME.match(path.name)
    if number is None or not 2 <= int(number[1]) <= MOST_RANKS:
        raise BadFileError("the file name does not say the number of GPUs (AR_GPU<n>_...)")
    ranks = int(number[1])
    _, rows, named = read(path, names=VTRAIN_COLUMNS)

    def told(row: Row) -> tuple[int, float]:
        num_bytes, seconds = row.needed_count("size"), row.needed("time_ns") * 1e-9
        check_possible("time_ns", seconds, collective_floor_s(num_bytes, ranks), "all_reduce")
        return num_bytes, seconds

    tries = [tried(row, told) for row in rows]
    kept = dict(one for one in tries if isinstance(one, tuple) and one[0] >= MIN_BYTES)
    report_named(path, [*named, *(one for one in tries if isinstance(one, Named))], num_judged=len(rows))
    source = "vtrain_a100" if "a100" in path.parent.name.lower() else path.parent.name
    return [System(f"{source} {ranks}x1", source, CollectiveKind.ALL_REDUCE, ranks, 1, dict(sorted(kept.items())))]


def known_topology(system: System) -> Topology | None:
    """The topology of the systems that we know by name."""
    ranks, nodes = system.num_ranks, system.num_nodes
    if nodes > 1:
        return None  # the files do not say what network it was
    if system.source in ("vtrain_a100", "a100_dgx_allreduce"):
        return nvswitch_topology(DGX_A100, ranks, nodes)
    if system.source == "h100_dgx_allreduce":
        return nvswitch_topology(DGX_H100, ranks, nodes)
    name = f"a40_{ranks}_bridged"
    return load_topology(name) if system.source == "a40_allreduce" and name in topology_names() else None


def possible_topologies(system: System) -> list[Topology]:
    """Every topology of the right ranks and nodes: switches, rings over PCIe, cards near and far, presets."""
    ranks, nodes = system.num_ranks, system.num_nodes
    if nodes == 1:
        made = [nvswitch_topology(machine, ranks, nodes) for machine in (DGX_A100, DGX_H100)]
        made += [
            pcie_topology(
                f"pcie_{speed}",
                ranks,
                speed * 1e9,
                compute_capability=machine.compute_capability,
                cpu_vendor=CpuVendor.AMD,
            )
            for machine in (DGX_A100, DGX_H100)
            for speed in (12, 24, 40)
        ]
    else:
        made = [
            nvswitch_topology(
                replace(machine, num_nics=nics, nic_path=path, name=f"{machine.name}_{path.name.lower()}_{nics}"),
                ranks,
                nodes,
            )
            for machine in (DGX_A100, DGX_H100)
            for nics in (1, 2, 4, 8)
            for path in (PathType.PIX, PathType.PHB)
        ]
    for name in topology_names():
        preset = load_topology(name)
        if nodes > 1 and preset.num_nodes > 1 and preset.ranks_per_node == ranks // nodes:
            made.append(preset.with_nodes(nodes))
        elif (preset.num_nodes, preset.num_ranks) == (nodes, ranks):
            made.append(preset)
    return made


def measurements(system: System, split: str, *, held_out: bool) -> list[Measurement]:
    """The sizes that the fit sees, or those that it does not."""
    return [
        Measurement(Collective(system.kind, size, system.num_ranks), seconds)
        for index, (size, seconds) in enumerate(system.seconds.items())
        if (is_held_out(size) if split == "bands" else index % 2 == 1) == held_out
    ]


def fitted(system: System, forced: Topology | None, split: str) -> tuple[LinkFit, Topology, bool]:
    """The fit, its topology, and whether that was chosen by the fit."""
    seen = measurements(system, split, held_out=False)
    topology = forced or known_topology(system)
    if topology is not None:
        return fit_link(seen, topology), topology, False
    fits = [(fit_link(seen, candidate), candidate) for candidate in possible_topologies(system)]
    best = min(fits, key=lambda pair: pair[0].mean_abs_error)
    return *best, True


def evaluate(system: System, forced: Topology | None, split: str = "bands") -> dict[str, object]:
    """Fit on the even bands, report on the odd ones."""
    fit, topology, chosen_by_fit = fitted(system, forced, split)
    errors, parts = [], defaultdict(list)
    for held in measurements(system, split, held_out=True):
        predicted = wire_terms(held.collective, topology).seconds(fit.link)
        error = 100 * (predicted / held.seconds - 1)
        errors.append(error)
        parts[held.collective.num_bytes.bit_length() - 1].append((error, held.collective))
    octaves = []
    for octave, members in sorted(parts.items()):
        way = "point-to-point"
        if not system.kind.traits.is_point_to_point:
            config = choose(members[0][1], topology).config
            way = f"{config.algorithm}/{config.protocol}"
        octaves.append(
            {
                "from_bytes": 1 << octave,
                "num_sizes": len(members),
                "mean_abs_error_pct": fmean(abs(error) for error, _ in members),
                "bias_pct": fmean(error for error, _ in members),
                "choice_at_first": way,
            }
        )
    return {
        "system": system.name,
        "collective": system.kind.value,
        "required": system.name in REQUIRED or system.source == "vtrain_a100",
        "topology": topology.name,
        "topology_chosen_by_fit": chosen_by_fit,
        "num_fitted": len(fit.log_residuals),
        "num_held_out": len(errors),
        "bytes_per_s": fit.link.bytes_per_s,
        "bytes_per_s_error_pct": 100 * fit.bytes_per_s_error,
        "latency_scale": fit.link.latency_scale,
        "latency_scale_error_pct": 100 * fit.latency_scale_error,
        "correlation": fit.correlation,
        "fitted_error_pct": 100 * fit.mean_abs_error,
        "mean_abs_error_pct": fmean(abs(error) for error in errors),
        "mean_abs_error_by_octave_pct": fmean(octave["mean_abs_error_pct"] for octave in octaves),
        "max_abs_error_pct": max(abs(error) for error in errors),
        "price_error_pct": price_error_pct(system, split),
        "octaves": octaves,
    }


def price_error_pct(system: System, split: str) -> float | None:
    """Mean error at the sizes held out of the price that groups, steps and planners share; None without a preset.

    The preset's own links and NCCL's choice: nothing is fitted here, and vidur's DGX A100 is priced on vTrain's link.
    """
    if system.source not in PRESETS or system.num_nodes > 1:
        return None
    model = ContentionModel(load_preset(PRESETS[system.source]), load_profile("plausible"))
    held = measurements(system, split, held_out=True)
    return fmean(
        abs(100 * (model.collective(one.collective, CommConfig()).seconds() / one.seconds - 1)) for one in held
    )


def find_files(given: list[Path]) -> list[Path]:
    """The measurement files in the places given, or in the usual ones."""
    roots = data_roots()
    root = next((place for place in roots if (place / "vidur").is_dir()), roots[-1])
    places = given or [root / "vidur", root / "validation" / "vtrain_a100_allreduce_lut"]
    found = []
    for place in places:
        if place.is_dir():
            found += [path for path in sorted(place.rglob("*")) if is_measurement(path)]
        elif place.is_file():
            found.append(place)
    return found


def is_measurement(path: Path) -> bool:
    """Whether a file's name says that it holds times of collectives."""
    return path.is_file() and (
        VTRAIN_NAME.match(path.name) is not None
        or re.search(r"(all_?reduce|send_?recv).*\.csv$", path.name) is not None
    )


def main() -> int:
    """Fit, report; exit code 1 if a required system misses the target, 2 without data that can be judged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("places", type=Path, nargs="*", metavar="FILE_OR_FOLDER")
    parser.add_argument("--topology", choices=topology_names())
    parser.add_argument("--split", choices=SPLITS, default="bands")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    files = find_files(args.places)
    if not files:
        print("no measurements found: give files or folders, or set LAGOM_DATA", file=sys.stderr)
        return 2
    forced = load_topology(args.topology) if args.topology else None
    rows, unread = [], []
    for path in files:
        try:
            systems = read_vtrain(path) if VTRAIN_NAME.match(path.name) else read_vidur(path)
        except BadFileError as error:
            unread.append({"file": path.name, "why": one_line(error)})
            continue
        for system in systems:
            try:
                rows.append(evaluate(system, forced, args.split))
            except (ValueError, ArithmeticError, LagomError) as error:  # too few sizes, or none held out
                unread.append({"file": system.name, "why": one_line(error)})
    if not rows:
        first = f": {unread[0]['file']}: {unread[0]['why']}" if unread else ""
        print(f"collective_time: nothing can be judged{first}", file=sys.stderr)
        return 2
    rows.sort(key=lambda row: not row["required"])
    if args.json:
        result = {
            "split": SPLITS[args.split],
            "min_bytes": MIN_BYTES,
            "target_pct": TARGET_PCT,
            "systems": rows,
            "not_read": unread,
        }
        print(json.dumps(result))
    else:
        report(rows, unread, SPLITS[args.split])
    missed = [row for row in rows if row["required"] and row["mean_abs_error_pct"] > TARGET_PCT]
    return 1 if missed else 0


def report(rows: list[dict], unread: list[dict], split: str) -> None:
    """Print the table for people."""
    print(f"{split}; * target at most {TARGET_PCT:g} %; ? topology chosen by the fit")
    print(
        f"{'system':26} {'topology':22} {'fit':>5} {'held':>5}  B GB/s (+-)     s (+-)     error  octaves   max   price"
    )
    for row in rows:
        chosen = "?" if row["topology_chosen_by_fit"] else " "
        print(
            f"{'*' if row['required'] else ' '}{row['system']:25} {row['topology']:21}{chosen} "
            f"{row['num_fitted']:5} {row['num_held_out']:5}  "
            f"{row['bytes_per_s'] / 1e9:6.1f} {row['bytes_per_s_error_pct']:4.1f}%  "
            f"{row['latency_scale']:5.2f} {row['latency_scale_error_pct']:5.1f}%  "
            f"{row['mean_abs_error_pct']:6.2f}% {row['mean_abs_error_by_octave_pct']:6.2f}% "
            f"{row['max_abs_error_pct']:6.1f}%"
            + ("" if row["price_error_pct"] is None else f" {row['price_error_pct']:6.1f}%")
        )
    required = [row["mean_abs_error_pct"] for row in rows if row["required"]]
    if required:
        print(f"mean over the {len(required)} required systems: {fmean(required):.2f}%, worst {max(required):.2f}%")
    for entry in unread:
        print(f"not read: {entry['file']}: {entry['why']}")


if __name__ == "__main__":
    sys.exit(main())
