"""What each tuner still finds on real gloo collectives while the machine is disturbed; the twin of robustness.py.

    python benchmarks/robustness_gloo.py examples/overlaps/gloo_fsdp.toml [--repetitions 3] [--pairs 9] [--json]

The search runs under a disturbance that is real: another process of this script takes the core or the loopback.

    none          nothing added
    stragglers    one measurement in eight: a process spins on the last rank's core
    two_humps     one in three: the same, half of the time
    neighbour     runs of four measurements during a flood of loopback traffic of somebody else
    late_shapes   from the sixth measurement on, twice the computations

Then the disturbance ends, and what the tuner stands by is paired with the default in `--pairs` shuffled rounds (of the
longer group after `late_shapes`). Tuners run as users run them, guarded. Two ranks on two cores.
"""

import argparse
import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from lagom_overlap.backends.base import Backend
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.record import describe_machine, package_versions, utc_now
from lagom_overlap.tuners.guard import make_tuner
from lagom_overlap.tuners.problem import GroupProblem
from lagom_overlap.tuners.study import Study
from lagom_overlap.tuners.verdict import PairedRatio
from lagom_overlap.verbs.compare import measured_rounds
from lagom_overlap.workload import OverlapGroup

TUNERS: Final = ("ours", "lagom", "autoccl")
LATE_SHAPES: Final = "late_shapes"
CHANGES_AT: Final = 5
LONGEST_S: Final = 900
"""A disturber ends after this long, whatever happens."""


def spin(core: int, duty: float, on: Event, end: Event) -> None:
    """Takes this share of a core while `on` is set."""
    os.sched_setaffinity(0, {core})
    deadline = time.monotonic() + LONGEST_S
    while not end.is_set() and time.monotonic() < deadline:
        if not on.is_set():
            time.sleep(0.002)
            continue
        until = time.perf_counter() + 0.01 * duty
        while time.perf_counter() < until:
            pass
        time.sleep(0.01 * (1 - duty))


def flood(_core: int, _duty: float, on: Event, end: Event) -> None:
    """Sends 256 KiB blocks to itself over the loopback while `on` is set."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    block, deadline = bytes(256 * 1024), time.monotonic() + LONGEST_S
    sender.setblocking(False)
    receiver.setblocking(False)
    while not end.is_set() and time.monotonic() < deadline:
        if not on.is_set():
            time.sleep(0.002)
            continue
        for call in (lambda: sender.send(block), lambda: receiver.recv(len(block))):
            try:
                call()
            except BlockingIOError:
                continue
    sender.close()
    receiver.close()


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A process, the share of its core that it takes, and the measurements during which it runs."""

    disturber: Callable[[int, float, Event, Event], None] | None
    duty: float
    is_on: Callable[[int, random.Random], bool]


DISTURBANCES: Final = {
    "none": Disturbance(None, 0.0, lambda _number, _rng: False),
    "stragglers": Disturbance(spin, 1.0, lambda _number, rng: rng.random() < 1 / 8),
    "two_humps": Disturbance(spin, 0.5, lambda _number, rng: rng.random() < 1 / 3),
    "neighbour": Disturbance(flood, 1.0, lambda number, _rng: number // 4 % 2 == 1),
    LATE_SHAPES: Disturbance(None, 0.0, lambda _number, _rng: False),
}


@contextmanager
def disturber(disturbance: Disturbance) -> Iterator[Event]:
    """The process of a disturbance, idle until the event is set; gone at the end."""
    context = multiprocessing.get_context("spawn")
    on, end = context.Event(), context.Event()
    if disturbance.disturber is None:
        yield on
        return
    last_core = max(os.sched_getaffinity(0))
    process = context.Process(
        target=disturbance.disturber, args=(last_core, disturbance.duty, on, end), name="disturber", daemon=True
    )
    process.start()
    try:
        yield on
    finally:
        end.set()
        process.join(5)
        process.kill()


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A tuner under a disturbance: the default's time over the recommended one's, afterwards, per repetition."""

    disturbance: str
    tuner: str
    ratios: list[float]
    num_measurements: list[int]
    kept_default: int


def longer_group(spec: JobSpec) -> OverlapGroup:
    """The job's group with its computations twice."""
    (group,) = Job(spec).groups
    again = tuple(replace(comp, name=f"{comp.name}.again") for comp in group.computations)
    return replace(group, name=f"{group.name} longer", computations=(*group.computations, *again))


def drive(study: Study, backend: Backend, problem: GroupProblem, longer: OverlapGroup, kind: str, *, seed: int) -> None:
    """The search under a disturbance."""
    rng, number, disturbance = random.Random(seed), 0, DISTURBANCES[kind]
    with disturber(disturbance) as on:
        while (step := study.next()) is not None:
            group = longer if kind == LATE_SHAPES and number >= CHANGES_AT else problem.group
            on.set() if disturbance.is_on(number, rng) else on.clear()
            (assignment,) = step.assignments.values()
            study.report(step, {problem.group.name: backend.measure(group, assignment)})
            number += 1


def run(spec: JobSpec, kind: str, name: str, seed: int, num_pairs: int) -> tuple[float, int, bool]:
    """One search and its verdict on fresh ranks: ratio, measurements, whether the default was kept."""
    groups = (*Job(spec).groups, longer_group(spec))
    backend = Job(spec).open(spec.job.backend, Job(spec).request_for(groups, seed=seed))
    try:
        problem, longer_problem = (backend.problem(group) for group in groups)
        tuner = make_tuner(name, (problem,), seed=seed, options={}, guarded=True)
        study = Study((problem,), tuner, seed=seed, num_pairs=3, max_measurements=spec.tune.budget.measurements)
        study.skip_verdict()
        drive(study, backend, problem, longer_problem.group, kind, seed=seed)
        found = study.recommended[problem.group.name]
        at_end = longer_problem if kind == LATE_SHAPES else problem
        arms = {"default": {at_end.group.name: at_end.default}, "tuned": {at_end.group.name: found}}
        rounds = list(measured_rounds(backend, (at_end,), arms, num_pairs, seed))
    finally:
        backend.close()
    ratio = PairedRatio.of(*([held[arm].makespan_s for held in rounds] for arm in arms))
    return ratio.median_ratio, study.num_measurements, found == problem.default


def print_table(rows: list[Row]) -> None:
    """Markdown."""
    print("| disturbance | tuner | default / tuned, median [least, most] | measurements | kept the default |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.disturbance} | {row.tuner} | {median(row.ratios):.3f} [{min(row.ratios):.3f}, "
            f"{max(row.ratios):.3f}] | {median(row.num_measurements):g} | {row.kept_default}/{len(row.ratios)} |"
        )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--tuners", default=",".join(TUNERS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    spec, before = read_job(arguments.job), os.getloadavg()[0]
    found: dict[tuple[str, str], list[tuple[float, int, bool]]] = {}
    for seed in range(arguments.repetitions):
        cells = [(kind, name) for kind in DISTURBANCES for name in arguments.tuners.split(",")]
        random.Random(seed).shuffle(cells)
        for kind, name in cells:
            print(f"repetition {seed}: {kind}, {name}", file=sys.stderr)
            found.setdefault((kind, name), []).append(run(spec, kind, name, seed, arguments.pairs))
    rows = [
        Row(
            disturbance=kind,
            tuner=name,
            ratios=[ratio for ratio, _, _ in found[kind, name]],
            num_measurements=[count for _, count, _ in found[kind, name]],
            kept_default=sum(kept for _, _, kept in found[kind, name]),
        )
        for kind in DISTURBANCES
        for name in arguments.tuners.split(",")
    ]
    if not arguments.json:
        print(f"load {before:.1f} before, {os.getloadavg()[0]:.1f} after\n")
        print_table(rows)
        return
    head = {"date": utc_now(), "machine": describe_machine(), "versions": package_versions()}
    print(msgspec.json.format(msgspec.json.encode({**head, "job": spec.job.name, "rows": rows})).decode())


if __name__ == "__main__":
    main()
