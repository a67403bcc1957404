"""Fits what a GPU keeps of its product rate in a whole step, and of attention's, on published steps.

    python benchmarks/fit_steps.py training_steps_shown.csv [--gpu h100_dgx [--attention] | --pairs]

One number per GPU (`sustained_share`) on the dense Megatron rows, one per distinct job; then once more without each
model family, and what its rows are off by. `--attention` fits `attention_share` too: what attention keeps of the rates
of its own benchmarks (`benchmarks/fit_attention.py`), where those ran at other clocks than steps do. torchtitan's rows,
fine-tuning on packed sequences and every mixture of experts stay out.

`--pairs` fits what products in MXFP8 keep of FP8's rate (`block_share`, one number for all GPUs) on lines that follow
each other and differ in the format alone.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.cost.operators import load_operators
from lagom_overlap.workload.precision import ProductFormat
from measured_rows import Named, exit_code_of, interrupted, read, report_named, tried
from training_steps.case import COLUMNS, StepCase
from training_steps.jobs import case_of
from training_steps.judge import FITTED_GROUP
from training_steps.predict import predicted

Point = NDArray[np.float64]
_ROUNDS: Final = 3
_STEP: Final = 1.05
_LEAST_ERROR: Final = 0.02
"""Below this a row counts as right: its weight grows no further (least absolute errors by reweighting)."""


def _ratios(cases: Sequence[StepCase], point: Point) -> Point:
    found = []
    for case in cases:
        base = load_operators(case.cluster.gpu)
        share = point[1] if len(point) > 1 else base.attention_share
        operators = replace(base, sustained_share=float(point[0]), attention_share=float(share))
        found.append(predicted(case, operators).iteration_s / case.measured_s)
    return np.asarray(np.log(found))


def _fit(cases: Sequence[StepCase], start: Point, rounds: list[Point] | None = None) -> Point:
    """The fitted point; `rounds` gets the point after every round."""
    point = start.copy()
    for _ in range(_ROUNDS):
        base = _ratios(cases, point)
        columns = []
        for place in range(len(point)):
            moved = point.copy()
            moved[place] *= _STEP
            columns.append((_ratios(cases, moved) - base) / np.log(_STEP))
        weights = 1.0 / np.sqrt(np.maximum(np.abs(base), _LEAST_ERROR))
        matrix = np.array(columns).T * weights[:, None]
        change = np.linalg.lstsq(matrix, -base * weights, rcond=None)[0]
        point = point * np.exp(np.clip(change, -0.4, 0.4))
        if rounds is not None:
            rounds.append(point)
    return point


def _words(point: Point) -> str:
    names = ("sustained_share", "attention_share")
    return ", ".join(f"{name} = {value:.4g}" for name, value in zip(names, point, strict=False))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the fitted numbers, and every family's error under the fit without it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    parser.add_argument("--pairs", action="store_true", help="MXFP8 against FP8 instead")
    parser.add_argument("--attention", action="store_true", help="fit attention_share too")
    parser.add_argument("--gpu", default="h100_dgx", help="the cluster preset (default: %(default)s)")
    arguments = parser.parse_args(argv)
    jobs: dict[object, StepCase] = {}
    _, rows, bad = read(arguments.file, COLUMNS)
    found = [tried(row, case_of) for row in rows]
    every = [case for case in found if isinstance(case, StepCase)]
    report_named(arguments.file, [*bad, *(one for one in found if isinstance(one, Named))], num_judged=len(every))
    if arguments.pairs:
        return _pairs(every)
    for case in every:
        if case.group == FITTED_GROUP and case.cluster.name == arguments.gpu:
            jobs.setdefault(case.job, case)
    if not jobs:
        sys.stderr.write(f"fit_steps: no dense Megatron row of {arguments.gpu}\n")
        return 2
    return _printed(arguments.gpu, list(jobs.values()), 2 if arguments.attention else 1)


def _pairs(every: Sequence[StepCase]) -> int:
    """Fits the share with which MXFP8 is as much slower than FP8 as measured, in the mean of all pairs."""
    formats = (ProductFormat.FP8_CURRENT, ProductFormat.MXFP8)
    pairs = [
        (one, other)
        for one, other in pairwise(case for case in every if case.group == FITTED_GROUP)
        if (one.what, one.line + 1) == (other.what, other.line)
        and (one.precision.products, other.precision.products) == formats
    ]
    if not pairs:
        sys.stderr.write("fit_steps: no dense Megatron row in MXFP8 follows the same in FP8\n")
        return 2
    measured = [other.measured_s / one.measured_s for one, other in pairs]
    plain_s = [predicted(one).iteration_s for one, _ in pairs]

    def off(share: float) -> float:
        """By what pairs are off in the mean."""
        found = [predicted(other, replace(load_operators(other.cluster.gpu), block_share=share)) for _, other in pairs]
        ratios = [times.iteration_s / base_s for times, base_s in zip(found, plain_s, strict=True)]
        return float(np.mean(np.log(ratios) - np.log(measured)))

    share, before = 1.0, 0.95
    for _ in range(_ROUNDS):
        here, there = off(share), off(before)
        share, before = share - here * (share - before) / (here - there), share
    shown = ", ".join(f"{100.0 * (ratio - 1.0):+.1f}" for ratio in measured)
    print(f"{len(pairs)} pairs, measured {shown} %: block_share = {share:.3f}")
    return 0


def _printed(gpu: str, every: Sequence[StepCase], num_numbers: int) -> int:
    """Fits and prints; what is known where Ctrl-C ends it."""
    families: dict[str, list[StepCase]] = defaultdict(list)
    for case in every:
        families[case.family].append(case)
    operators = load_operators(every[0].cluster.gpu)
    start = np.array([operators.sustained_share, operators.attention_share][:num_numbers])
    rounds: list[Point] = []
    left_out: list[float] = []
    is_printed = False
    try:
        point = _fit(every, start, rounds)
        print(f"{gpu}, {len(every)} jobs: {_words(point)}; mean error {_mean_pct(every, point):.1f} %", flush=True)
        is_printed = True
        for family, cases in sorted(families.items() if len(families) > 1 else ()):
            others = [case for case in every if case.family != family]
            found = _fit(others, start)
            errors = 100.0 * np.expm1(_ratios(cases, found))
            left_out += [abs(error) for error in errors]
            shown = ", ".join(f"{error:+.1f}" for error in errors)
            print(f"without {family}: {_words(found)}; its rows {shown} %", flush=True)
    except KeyboardInterrupt:
        if is_printed:
            return interrupted("fit_steps", f"so far, {_summary(left_out)}")
        known = f"{len(rounds)} of {_ROUNDS} rounds: {_words(rounds[-1] if rounds else start)}"
        known += "" if rounds else " (the start)"
        return interrupted("fit_steps", f"so far, {gpu}, {len(every)} jobs, {known}")
    if left_out:
        print(_summary(left_out))
    return 0


def _summary(left_out: Sequence[float]) -> str:
    if not left_out:
        return "no family left out"
    return f"left out: mean {np.mean(left_out):.1f} %, worst {max(left_out):.1f} % of {len(left_out)} jobs"


def _mean_pct(cases: Sequence[StepCase], point: Point) -> float:
    return float(np.mean(np.abs(100.0 * np.expm1(_ratios(cases, point)))))


if __name__ == "__main__":
    sys.exit(exit_code_of("fit_steps", main))
