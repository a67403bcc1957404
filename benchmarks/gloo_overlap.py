"""The demo's job on real collectives: native call, engine default, fixed settings, AutoCCL and Lagom, paired.

    python benchmarks/gloo_overlap.py examples/gpt_fsdp_gloo.toml [--pairs 15] [--json]

Every tuner searches unguarded; then all results are measured in shuffled rounds on one set of rank processes.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles

import msgspec

from lagom_overlap.job.build import groups_of, open_backend, request_of
from lagom_overlap.job.compare import measure_rounds, search
from lagom_overlap.job.spec import read_job
from lagom_overlap.record import describe_machine, package_versions, utc_now
from lagom_overlap.units import MS

TUNERS = ("autoccl", "lagom")


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
            study = search(spec, name, problems, backend, spec.tune.seed)
            arms[name], used[name] = study.recommended, study.num_measurements
        times = measure_rounds(backend, problems, arms, arguments.pairs, spec.tune.seed)
    finally:
        backend.close()
    native = [run.makespan_s for run in times["native"]]
    rows = []
    for name, runs in times.items():
        ratios = [n / run.makespan_s for n, run in zip(native, runs, strict=True)]
        q25, _, q75 = quantiles(ratios, n=4, method="inclusive")
        rows.append(
            {
                "arm": name,
                "num_measurements": used[name],
                "makespan_s": median(run.makespan_s for run in runs),
                "comp_s": median(run.comp_s for run in runs),
                "comm_s": median(run.comm_s for run in runs),
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
