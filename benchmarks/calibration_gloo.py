"""The calibration loop on this machine: measure overlaps, fit a contention model, predict others, tune, run, compare.

    python benchmarks/calibration_gloo.py examples/gpt_fsdp_gloo.toml [--rounds 7] [--pairs 9] [--json]

1. Interleaved, in shuffled rounds: calibration shapes (below; none is the job's) under a handful of settings, their
   computations alone (during a collective of 8 bytes), and of the job nothing but its default runs.
2. Fit (`cost/overlap_fit.py`): constants with their uncertainty, residuals.
3. Held out: each calibration shape is predicted by a fit that never saw it, once from its computation measured alone
   and once from its default run only, under every setting but the default.
4. The job: from its default runs only, the computation alone is inferred (from computations that ran after the
   collectives' end, else by the model); the tuner searches on the fitted model.
   --run FOLDER, a run of `lagom tune` on the job: each arm of its verdict is predicted from its default runs.
5. Default and tuned run interleaved: predicted against measured, and the predicted ratio against the paired one.

Two ranks on two cores: every figure is of this machine and its load during these minutes.
"""

import argparse
import random
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles

import msgspec

from lagom_overlap.backends.base import Backend
from lagom_overlap.backends.fitted import FittedBackend, overlap_of
from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost.overlap_fit import (
    Observation,
    OverlapConstants,
    OverlapFit,
    OverlapTimes,
    fit_overlaps,
    infer_from_default,
    predict,
)
from lagom_overlap.cost.overlap_preset import constants_to_json
from lagom_overlap.jobfile.job import Job, limits_of
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.record import describe_machine, package_versions, utc_now
from lagom_overlap.timeline import SpanKind, Timeline
from lagom_overlap.tuners.guard import make_tuner
from lagom_overlap.tuners.problem import Assignment, Measurement
from lagom_overlap.tuners.study import Study
from lagom_overlap.units import MIB, MS
from lagom_overlap.verbs.own_trace import arms_of_run, read_own_run
from lagom_overlap.workload import CommOp, CompOp, Gemm, MemoryBound, OverlapGroup, Work

AG, RS = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
UNTOUCHED = CommConfig()


def comp_alone_from_twins(group: OverlapGroup, timeline: Timeline) -> float | None:
    """Seconds of the group's computations alone, from the runs that no collective touched; None if one has none."""
    works = {op.name: op.work for op in group.computations}
    comms = timeline.of(SpanKind.COMM)
    free: dict[Work, list[float]] = {}
    for span in timeline.of(SpanKind.COMP):
        work = works.get(span.name)
        if work is not None and not any(c.start_s < span.end_s and span.start_s < c.end_s for c in comms):
            free.setdefault(work, []).append(span.duration_s)
    if any(work not in free for work in works.values()):
        return None
    alone = {work: median(held) for work, held in free.items()}
    return sum(alone[work] for work in works.values())


def sliced(channels: int, mib: float) -> CommConfig:
    """A setting by channels and MiB per slice."""
    return CommConfig(num_channels=channels, chunk_bytes=int(mib * MIB))


SETTINGS: tuple[CommConfig, ...] = (
    UNTOUCHED,
    sliced(1, 256),
    sliced(1, 8),
    sliced(1, 2),
    sliced(1, 0.5),
    sliced(2, 0.5),
    sliced(2, 2),
    sliced(2, 8),
    sliced(4, 2),
    sliced(4, 16),
    sliced(8, 1),
)
SHAPES: Mapping[str, tuple[int, int, int, tuple[tuple[CollectiveKind, int], ...]]] = {
    # name: (tokens, width, products, collectives in MiB); a product is tokens x 4 width x width
    "short": (256, 512, 6, ((AG, 32), (RS, 32))),
    "long": (256, 512, 30, ((RS, 24), (AG, 24))),
    "wide": (128, 768, 14, ((AG, 16), (RS, 48))),
    "gather": (256, 512, 12, ((AG, 48),)),
    "scatter": (256, 512, 16, ((RS, 32),)),
    "small": (512, 256, 14, ((RS, 16), (AG, 16))),
}
"""None is the demo's: other products, other sizes, other orders."""


def shape_group(name: str, tokens: int, width: int, products: int, comms: Sequence[tuple[CollectiveKind, int]]):
    """A calibration shape as an overlap group between two ranks."""
    return OverlapGroup(
        name=name,
        computations=tuple(
            CompOp(name=f"{name}.mm{i}", work=Gemm(tokens, 4 * width, width, 4)) for i in range(products)
        ),
        comms=tuple(
            CommOp(name=f"{name}.{kind}{i}", collective=Collective(kind, mib * MIB, 2))
            for i, (kind, mib) in enumerate(comms)
        ),
    )


def alone(group: OverlapGroup) -> OverlapGroup:
    """The same computations during a collective of 8 bytes: alone as far as the backend can."""
    tiny = CommOp(name=f"{group.name}.tiny", collective=Collective(AG, 8, 2))
    return replace(group, name=f"{group.name}.alone", comms=(tiny,), starts_after=(), occurrences=())


def bare(name: str, kind: CollectiveKind, mib: int) -> OverlapGroup:
    """A collective with next to no computation."""
    return OverlapGroup(
        name=name,
        computations=(CompOp(name=f"{name}.nop", work=MemoryBound(4096)),),
        comms=(CommOp(name=f"{name}.{kind}", collective=Collective(kind, mib * MIB, 2)),),
    )


Point = tuple[OverlapGroup, Assignment]


def measured(backend: Backend, point: Point) -> Measurement:
    """One run."""
    outcome = backend.measure(*point)
    if not isinstance(outcome, Measurement):
        sys.exit(f"{point[0].name} cannot run: {outcome.reason}")
    return outcome


def interleaved(backend: Backend, points: Sequence[Point], rounds: int, seed: int) -> dict[Point, list[Measurement]]:
    """Every point once per round, in an order shuffled anew."""
    rng, runs = random.Random(seed), defaultdict(list)
    for number in range(rounds):
        order = list(points)
        rng.shuffle(order)
        for point in order:
            runs[point].append(measured(backend, point))
        print(f"round {number + 1}/{rounds}", file=sys.stderr, flush=True)
    return dict(runs)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """25th, 50th, 75th percentile."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return low, middle, high


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One held-out makespan; `spread` is IQR over median.

    Predicted from the computation measured alone, from the default runs only, and from these without use of twins.
    """

    shape: str
    setting: str
    measured_s: float
    spread: float
    error_alone: float
    error_from_default: float | None
    error_by_model: float | None
    is_tuned: bool


def words(config: CommConfig) -> str:
    """A setting for people."""
    if config.is_untouched:
        return "native"
    return f"{config.num_channels}x{(config.chunk_bytes or 0) / MIB:g}M"


def twins_alone_s(group: OverlapGroup, runs: Sequence[Measurement]) -> float | None:
    """The computation alone from computations that ran after the collectives' end; None if most runs have no such."""
    twins = [comp_alone_from_twins(group, run.timeline) for run in runs if run.timeline is not None]
    known = [twin for twin in twins if twin is not None]
    return median(known) if 2 * len(known) > len(runs) else None


def modelled_alone_s(group: OverlapGroup, runs: Sequence[Measurement], constants: OverlapConstants) -> float | None:
    """The computation alone by the model, from the times under the default."""
    mean = Measurement.from_runs(runs)
    times = OverlapTimes(mean.makespan_s, mean.comp_s, mean.comm_s)
    try:
        return infer_from_default(
            overlap_of(group, (UNTOUCHED,) * len(group.comms), 0.0), constants, times
        ).comp_alone_s
    except ValueError:
        return None


def inferred_alone_s(group: OverlapGroup, runs: Sequence[Measurement], constants: OverlapConstants) -> float | None:
    """The computation alone from runs under the default only: twins in their timelines, else by the model."""
    return twins_alone_s(group, runs) or modelled_alone_s(group, runs, constants)


class Calibration:
    """The runs of the calibration shapes, as observations."""

    def __init__(self, groups: Sequence[OverlapGroup], runs: Mapping[Point, list[Measurement]]) -> None:
        self.groups = groups
        self._runs = runs
        self.alone_s = {
            group.name: median(run.comp_s for run in runs[alone(group), (UNTOUCHED,)])
            if len(group.computations) > 1
            else 0.0
            for group in groups
        }

    def makespans(self, group: OverlapGroup, config: CommConfig) -> list[float]:
        """The measured makespans of a shape under one setting."""
        return [run.makespan_s for run in self._runs[group, (config,) * len(group.comms)]]

    def observations(self, *, without: str = "") -> list[Observation]:
        """All shapes but one."""
        found = []
        for group in self.groups:
            if group.name == without:
                continue
            for config in SETTINGS:
                assignment = (config,) * len(group.comms)
                mean = Measurement.from_runs(self._runs[group, assignment])
                computes = self.alone_s[group.name] > 0
                times = OverlapTimes(mean.makespan_s, mean.comp_s if computes else 0.0, mean.comm_s)
                found.append(Observation(overlap_of(group, assignment, self.alone_s[group.name]), times))
        return found

    def held_out(self, group: OverlapGroup) -> list[Prediction]:
        """A shape predicted by a fit that never saw it."""
        constants = fit_overlaps(self.observations(without=group.name)).constants
        default = overlap_of(group, (UNTOUCHED,) * len(group.comms), self.alone_s[group.name])
        runs = self._runs[group, default.configs]
        ways = {"twins": twins_alone_s(group, runs), "model": modelled_alone_s(group, runs, constants)}
        rows = []
        for config in SETTINGS:
            overlap = replace(default, configs=(config,) * len(group.comms))
            times = self.makespans(group, config)
            low, middle, high = quartiles(times)
            errors = {
                way: None
                if alone_s is None or config.is_untouched
                else predict(replace(overlap, comp_alone_s=alone_s), constants).makespan_s / middle - 1
                for way, alone_s in ways.items()
            }
            predicted = predict(overlap, constants).makespan_s
            row = Prediction(
                shape=group.name,
                setting=words(config),
                measured_s=middle,
                spread=(high - low) / middle,
                error_alone=predicted / middle - 1,
                error_from_default=errors["model"] if errors["twins"] is None else errors["twins"],
                error_by_model=errors["model"],
                is_tuned=False,
            )
            rows.append((predicted, row))
        tuned = min(range(1, len(rows)), key=lambda index: rows[index][0])  # the setting that the fit would choose
        return [replace(row, is_tuned=index == tuned) for index, (_, row) in enumerate(rows)]


def summary(errors: Sequence[float]) -> dict[str, float]:
    """Of errors relative to the measured: mean and quartiles of their size, worst, share within 15 %."""
    sizes = [abs(error) for error in errors]
    low, middle, high = quartiles(sizes)
    return {
        "num": len(sizes),
        "mean": sum(sizes) / len(sizes),
        "q25": low,
        "median": middle,
        "q75": high,
        "worst": max(sizes),
        "share_within_15pct": sum(size <= 0.15 for size in sizes) / len(sizes),
    }


def tuned_on(fitted: FittedBackend, spec: JobSpec, groups: Sequence[OverlapGroup]) -> Mapping[str, Assignment]:
    """What the job's tuner ends with on the fitted model."""
    problems = tuple(fitted.problem(group) for group in groups)
    tuner = make_tuner(spec.tune.tuner, problems, seed=spec.tune.seed, options=spec.tune.options, guarded=False)
    study = Study(problems, tuner, seed=spec.tune.seed, max_measurements=spec.tune.budget.measurements)
    study.skip_verdict()
    named = {group.name: group for group in groups}
    while (step := study.next()) is not None:
        study.report(step, {name: fitted.measure(named[name], held) for name, held in step.assignments.items()})
    return study.recommended


def judged(
    spec: JobSpec,
    groups: Sequence[OverlapGroup],
    fit: OverlapFit,
    traces: Mapping[str, list[Measurement]],
    *,
    backend: Backend,
    pairs: int,
) -> list[dict[str, object]]:
    """Each group of the job: tuned on the fit from its default runs, then run against its default."""
    default = {group.name: (UNTOUCHED,) * len(group.comms) for group in groups}
    traced_s = {name: median(run.makespan_s for run in runs) for name, runs in traces.items()}
    inferred_s = {}
    for group in groups:
        alone_s = inferred_alone_s(group, traces[group.name], fit.constants)
        if alone_s is None:
            sys.exit(f"the default runs of {group.name} do not tell its computation alone")
        inferred_s[group.name] = alone_s
    fitted = FittedBackend(fit.constants, inferred_s, limits_of(spec.tune.space))
    tuned = tuned_on(fitted, spec, groups)
    rows = []
    for group in groups:
        arms = {"default": default[group.name], "tuned": tuned[group.name]}
        predicted = {arm: fitted.measure(group, held) for arm, held in arms.items()}
        runs = interleaved(backend, [(group, held) for held in dict.fromkeys(arms.values())], pairs, spec.tune.seed)
        times = {arm: [run.makespan_s for run in runs[group, held]] for arm, held in arms.items()}
        ratios = [before / after for before, after in zip(times["default"], times["tuned"], strict=True)]
        before, after = predicted["default"], predicted["tuned"]
        assert isinstance(before, Measurement) and isinstance(after, Measurement)  # noqa: PT018
        ratio = before.makespan_s / after.makespan_s
        rows.append(
            {
                "group": group.name,
                "tuned": {n: words(c) for n, c in zip(group.comm_names, tuned[group.name], strict=True)},
                "inferred_comp_alone_s": inferred_s[group.name],
                "traced_default_s": traced_s[group.name],
                "predicted_tuned_s": after.makespan_s,
                "measured_default_s": quartiles(times["default"]),
                "measured_tuned_s": quartiles(times["tuned"]),
                "error": after.makespan_s / median(times["tuned"]) - 1,
                "predicted_ratio": ratio,
                "measured_ratio": quartiles(ratios),
                "error_of_ratio": ratio / median(ratios) - 1,
            }
        )
    return rows


def show(result: Mapping[str, object], fit: OverlapFit, rows: Sequence[Prediction]) -> None:
    """The tables."""
    print(f"{result['machine']}, {result['versions']}, {result['date']}, {result['wall_s']:.0f} s")
    print(f"\nfit: mean |error| of the fitted makespans {fit.mean_abs_error:.1%}")
    for held in fit.table:
        known = f"+-{held.error:.0%}" if held.identified else "NOT IDENTIFIED"
        print(f"  {held.name:44} {held.value:10.3e}  {known}")
    print("\nheld out (fits that never saw the shape); error from the computation alone / from the default run only")
    for name in dict.fromkeys(row.shape for row in rows):
        cells = [
            f"{row.setting}{'*' if row.is_tuned else ''} {row.error_alone:+.0%}/"
            + ("-" if row.error_from_default is None else f"{row.error_from_default:+.0%}")
            for row in rows
            if row.shape == name
        ]
        print(f"  {name:8} " + "  ".join(cells))
    for key in [key for key in result if key.startswith("held_out_")]:
        found = result[key]
        print(
            f"  {key}: mean {found['mean']:.1%}, quartiles {found['q25']:.1%} {found['median']:.1%} "
            f"{found['q75']:.1%}, worst {found['worst']:.1%}, within 15 %: {found['share_within_15pct']:.0%} "
            f"of {found['num']}"
        )
    print("\nthe job, predicted from its default runs, then run")
    for row in result["job"]:
        q25, middle, q75 = (value / MS for value in row["measured_tuned_s"])
        r25, ratio, r75 = row["measured_ratio"]
        print(f"  {row['group']}: {row['tuned']}")
        print(
            f"    tuned: predicted {row['predicted_tuned_s'] / MS:.1f} ms, measured {middle:.1f} [{q25:.1f}, "
            f"{q75:.1f}] ms: {row['error']:+.1%}"
        )
        print(
            f"    default/tuned: predicted {row['predicted_ratio']:.3f}, measured {ratio:.3f} [{r25:.3f}, {r75:.3f}]: "
            f"{row['error_of_ratio']:+.1%}"
        )
    for arm in result["recorded_arms"]:
        low, middle, high = (value / MS for value in quartiles(arm["measured_s"]))
        print(
            f"  recorded run, arm {arm['arm']}: predicted {arm['predicted_s'] / MS:.1f} ms, measured {middle:.1f} "
            f"[{low:.1f}, {high:.1f}] ms over {len(arm['measured_s'])} rounds: {arm['error']:+.1%}"
        )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--rounds", type=int, default=7, help="runs of every calibration point")
    parser.add_argument("--pairs", type=int, default=11, help="rounds of default and tuned at the end")
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="a run of lagom tune whose arms are predicted")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the fitted constants")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    started = time.monotonic()
    spec = read_job(arguments.job)
    groups = Job(spec).groups
    shapes = [shape_group(name, *shape) for name, shape in SHAPES.items()]
    shapes_and_bare = [*shapes, bare("bare_gather", AG, 32), bare("bare_scatter", RS, 32)]
    points = [(group, (config,) * len(group.comms)) for group in shapes_and_bare for config in SETTINGS]
    points += [(alone(group), (UNTOUCHED,)) for group in shapes]
    job_points = {group.name: (group, (UNTOUCHED,) * len(group.comms)) for group in groups}
    backend = Job(spec).open("gloo", replace(Job(spec).request_for(groups), repeats=1))
    try:
        runs = interleaved(backend, [*points, *job_points.values()], arguments.rounds, spec.tune.seed)
        calibration = Calibration(shapes_and_bare, runs)
        fit = fit_overlaps(calibration.observations())
        rows = [row for group in shapes for row in calibration.held_out(group)]
        traces = {name: runs[point] for name, point in job_points.items()}
        job = judged(spec, groups, fit, traces, backend=backend, pairs=arguments.pairs)
    finally:
        backend.close()
    if arguments.save is not None:
        machine = describe_machine()
        note = f"gloo, {spec.job.ranks} ranks, {machine['cpu']}, {machine['cores']} cores, {utc_now()}"
        arguments.save.write_bytes(constants_to_json(fit.constants, note))
    arms = [] if arguments.run is None else arms_of_run(read_own_run(arguments.run), fit.constants)
    from_default = [row for row in rows if row.error_from_default is not None]
    result = {
        "machine": describe_machine(),
        "versions": package_versions(),
        "date": utc_now(),
        "wall_s": time.monotonic() - started,
        "rounds": arguments.rounds,
        "pairs": arguments.pairs,
        "fit": [asdict(constant) | {"identified": constant.identified} for constant in fit.table],
        "fit_mean_abs_error": fit.mean_abs_error,
        "held_out": [asdict(row) for row in rows],
        "held_out_alone": summary([row.error_alone for row in rows]),
        "held_out_from_default": summary([row.error_from_default for row in from_default]),
        "held_out_from_default_by_model": summary(
            [row.error_by_model for row in rows if row.error_by_model is not None]
        ),
        "held_out_tuned_alone": summary([row.error_alone for row in rows if row.is_tuned]),
        "held_out_tuned_from_default": summary([row.error_from_default for row in from_default if row.is_tuned]),
        "job": job,
        "recorded_arms": [asdict(arm) | {"error": arm.error} for arm in arms],
    }
    if arguments.json:
        print(msgspec.json.encode(result).decode())
    else:
        show(result, fit, rows)


if __name__ == "__main__":
    main()
