"""Plans predicted against measured on gloo ranks: with what ranks' cores share, measured before the plan, and without.

    python benchmarks/plan_predicted.py examples/plan_zero_gloo.toml examples/plan_experts_gloo.toml [--rounds 15]

Of each job: operators are timed alone and collectives next to computations (`PlanProblem.together`), a plan is made,
and program and plan run in interleaved rounds. The plan runs even where it is predicted to lose. Nothing is fitted:
what was measured before the plan is all that the prediction has. One line a job as JSON: the load, the rates, ratios
predicted without and with them, the measured ratio with its quartiles.
"""

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Final

import msgspec

from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.simulated import simulated
from lagom_overlap.record import describe_machine, package_versions, utc_now
from lagom_overlap.verbs.plan import planned
from lagom_overlap.verbs.plan_problem import PlanFlags, read_input
from lagom_overlap.workload.iteration import graph_digest

TIMEOUT_S: Final = 900.0
"""Of ranks on a machine that others load."""


def row_of(job: Path, rounds: int, seed: int) -> dict[str, object]:
    """One job."""
    load = os.getloadavg()[0]
    spec = read_job(job)
    spec = msgspec.structs.replace(spec, job=msgspec.structs.replace(spec.job, timeout_s=TIMEOUT_S))
    given = read_input(spec, PlanFlags(times="measure", execute=True))
    try:
        given = replace(given, problem=replace(given.problem, work=SearchBudget(8.0)))
        found = planned(given, "ours")
        alone = replace(given.problem, together={})
        ratios = {}
        for name, problem in (("alone", alone), ("together", given.problem)):
            steps = [simulated(problem, step).makespan_s for step in (given.issued, found.plan.iteration)]
            ratios[name] = {"before_s": steps[0], "after_s": steps[1], "ratio": steps[0] / steps[1]}
        assert given.ranks is not None
        run = given.ranks.run(
            found.plan.rewrites, rounds=rounds, seed=seed, graph=graph_digest(given.problem.iteration)
        )
    finally:
        given.close()
    pairs = [before / after for before, after in zip(run.before.makespan_s, run.after.makespan_s, strict=True)]
    low, middle, high = quantiles(pairs, n=4, method="inclusive")
    rates = sorted(given.problem.together.values())
    return {
        "job": job.stem,
        "ranks": given.num_ranks,
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "rates": [round(rates[0], 2), round(median(rates), 2), round(rates[-1], 2)],
        "predicted": ratios,
        "measured": {
            "before_s": median(run.before.makespan_s),
            "after_s": median(run.after.makespan_s),
            "ratio": middle,
            "q25": low,
            "q75": high,
        },
        "is_bitwise_equal": run.max_error == 0,
    }


def main() -> None:
    """Parses, runs job after job, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(
        json.dumps({"machine": describe_machine(), "versions": package_versions(), "date": str(utc_now())}), flush=True
    )
    for job in arguments.jobs:
        print(json.dumps(row_of(job, arguments.rounds, arguments.seed)), flush=True)


if __name__ == "__main__":
    main()
