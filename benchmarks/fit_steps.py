"""Fits what a GPU keeps of its product rate in a whole step, and its attention rate, on published steps.

    python benchmarks/fit_steps.py training_steps_shown.csv [--gpu h100_dgx]

Two numbers per GPU (`sustained_share`, `attention_flops`), or the first alone where one sequence length was measured,
on the dense Megatron rows, one per distinct job; then once more without each model family, and what its rows are off
by. torchtitan's rows and every mixture of experts stay out.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.cost.operators import load_operators
from lagom_overlap.errors import LagomError
from lagom_overlap.units import TFLOPS
from measured_rows import BadRowError, NotModelledError, exit_code_of, read
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
        flops = point[1] * TFLOPS if len(point) > 1 else base.attention_flops
        operators = replace(base, sustained_share=float(point[0]), attention_flops=float(flops))
        found.append(predicted(case, operators).iteration_s / case.measured_s)
    return np.asarray(np.log(found))


def _fit(cases: Sequence[StepCase], start: Point) -> Point:
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
        point *= np.exp(np.clip(change, -0.4, 0.4))
    return point


def _words(point: Point) -> str:
    names = ("sustained_share", "attention_flops in TFLOP/s")
    return ", ".join(f"{name} = {value:.4g}" for name, value in zip(names, point, strict=False))


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the fitted numbers, and every family's error under the fit without it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    parser.add_argument("--gpu", default="h100_dgx", help="the cluster preset (default: %(default)s)")
    arguments = parser.parse_args(argv)
    jobs: dict[object, StepCase] = {}
    for row in read(arguments.file, COLUMNS)[1]:
        try:
            case = case_of(row)
        except (BadRowError, NotModelledError, LagomError):
            continue
        if case.group == FITTED_GROUP and case.cluster.name == arguments.gpu:
            jobs.setdefault((case.family, case.layout, case.seq_len, case.cluster.num_gpus), case)
    families: dict[str, list[StepCase]] = defaultdict(list)
    for case in jobs.values():
        families[case.family].append(case)
    if not jobs:
        sys.stderr.write(f"fit_steps: no dense Megatron row of {arguments.gpu}\n")
        return 2
    lengths = {case.seq_len for case in jobs.values()}
    operators = load_operators(next(iter(jobs.values())).cluster.gpu)
    start = np.array([operators.sustained_share, operators.attention_flops / TFLOPS][: 1 if len(lengths) == 1 else 2])
    every = list(jobs.values())
    point = _fit(every, start)
    print(f"{arguments.gpu}, {len(every)} jobs: {_words(point)}; mean error {_mean_pct(every, point):.1f} %")
    left_out = []
    for family, cases in sorted(families.items() if len(families) > 1 else ()):
        others = [case for case in every if case.family != family]
        found = _fit(others, start)
        errors = 100.0 * np.expm1(_ratios(cases, found))
        left_out += [abs(error) for error in errors]
        print(f"without {family}: {_words(found)}; its rows {', '.join(f'{error:+.1f}' for error in errors)} %")
    if left_out:
        print(f"left out: mean {np.mean(left_out):.1f} %, worst {max(left_out):.1f} % of {len(left_out)} jobs")
    return 0


def _mean_pct(cases: Sequence[StepCase], point: Point) -> float:
    return float(np.mean(np.abs(100.0 * np.expm1(_ratios(cases, point)))))


if __name__ == "__main__":
    sys.exit(exit_code_of("fit_steps", main))
