"""The demo's job on real collectives: native call, engine default, fixed settings, AutoCCL and Lagom, paired.

    python benchmarks/gloo_overlap.py examples/gpt_fsdp_gloo.toml [--pairs 15] [--json]

Every tuner searches unguarded; then all results are measured in shuffled rounds on one set of rank processes.
"""

import argparse
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles

import msgspec

from lagom_overlap.backends.base import Assignment, Backend, Measurement
from lagom_overlap.job.build import groups_of, make_tuner, open_backend, request_of
from lagom_overlap.job.spec import JobSpec, read_job
from lagom_overlap.record import describe_machine, package_versions, utc_now
from lagom_overlap.tune.base import Problems
from lagom_overlap.tune.study import Study
from lagom_overlap.units import MS

TUNERS = ("autoccl", "lagom")


def searched(spec: JobSpec, name: str, problems: Problems, backend: Backend) -> tuple[Mapping[str, Assignment], int]:
    """What a tuner ends with, and the measurements it took."""
    tuner = make_tuner(name, problems, seed=spec.tune.seed, options={}, guarded=False)
    study = Study(problems, tuner, seed=spec.tune.seed, max_measurements=spec.tune.budget.measurements)
    study.skip_verdict()
    groups = {problem.group.name: problem.group for problem in problems}
    while (step := study.next()) is not None:
        study.report(step, {name: backend.measure(groups[name], a) for name, a in step.assignments.items()})
    return study.recommended, study.num_measurements


def rounds(backend: Backend, problems: Problems, arms: Mapping[str, Mapping[str, Assignment]], pairs: int, seed: int):
    """Per arm: the iteration's makespan, computation and summed communication of every round, in seconds."""
    rng, order = random.Random(seed), list(arms)
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arms}
    for _ in range(pairs):
        rng.shuffle(order)
        for name in order:
            total = (0.0, 0.0, 0.0)
            for problem in problems:
                run = backend.measure(problem.group, arms[name][problem.group.name])
                if not isinstance(run, Measurement):
                    sys.exit(f"{name} cannot run: {run.reason}")
                parts = (run.makespan_s, run.comp_s, run.total_comm_s)
                total = tuple(t + problem.group.count * part for t, part in zip(total, parts, strict=True))
            times[name].append(total)
    return times


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    spec = read_job(arguments.job)
    groups = groups_of(spec)
    backend = open_backend(spec, "gloo", request_of(spec, groups))
    try:
        problems = tuple(backend.problem(group) for group in groups)
        arms = {"native": {p.group.name: p.default for p in problems}}
        for name in problems[0].baselines:
            arms[name] = {p.group.name: p.baselines[name] for p in problems}
        used = dict.fromkeys(arms, 0)
        for name in TUNERS:
            arms[name], used[name] = searched(spec, name, problems, backend)
        times = rounds(backend, problems, arms, arguments.pairs, spec.tune.seed)
    finally:
        backend.close()
    native = [z for z, _, _ in times["native"]]
    rows = []
    for name, runs in times.items():
        ratios = [n / z for n, (z, _, _) in zip(native, runs, strict=True)]
        q25, _, q75 = quantiles(ratios, n=4, method="inclusive")
        rows.append(
            {
                "arm": name,
                "num_measurements": used[name],
                "makespan_s": median(z for z, _, _ in runs),
                "comp_s": median(y for _, y, _ in runs),
                "comm_s": median(x for _, _, x in runs),
                "median_ratio_over_native": median(ratios),
                "q25": q25,
                "q75": q75,
                "wins": sum(ratio > 1 for ratio in ratios),
                "pairs": arguments.pairs,
                "configs": {g: [asdict(c) for c in a] for g, a in arms[name].items()},
            }
        )
    result = {"machine": describe_machine(), "versions": package_versions(), "date": utc_now(), "rows": rows}
    if arguments.json:
        print(msgspec.json.encode(result).decode())
        return
    print(f"{spec.job.name}: {result['machine']}, {result['versions']}, {result['date']}")
    print(f"{'arm':15} {'probes':>6} {'Z ms':>7} {'Y ms':>7} {'X ms':>7}  native/this [q25, q75]  wins")
    for row in rows:
        settings = " ".join(
            f"{c['num_channels']}x{(c['chunk_bytes'] or 0) >> 10}K" for a in row["configs"].values() for c in a
        )
        print(
            f"{row['arm']:15} {row['num_measurements']:6} {row['makespan_s'] / MS:7.1f} {row['comp_s'] / MS:7.1f} "
            f"{row['comm_s'] / MS:7.1f}  {row['median_ratio_over_native']:.3f} [{row['q25']:.3f}, {row['q75']:.3f}]  "
            f"{row['wins']}/{row['pairs']}  {settings}"
        )


if __name__ == "__main__":
    main()
