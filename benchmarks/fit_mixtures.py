"""Fits what rearranging kernels reach of memory's rate and what Megatron-LM's host needs for a launch, on mixtures.

    python benchmarks/fit_mixtures.py training_steps_shown.csv

Two numbers, `rearranged_share` (one for all GPUs with FP8, `gpus/NAME.toml`) and `launch_s` of
`frameworks/megatron.toml`, on the rows of Qwen3-30B-A3B, one per distinct job, by the least mean absolute error; then
once more without each GPU, and what its rows are off by. `further_launch_s` has a source: with it free, too, these rows
tell the sum of both, not the two apart. What products and attention reach stays as the dense rows have it
(`fit_steps.py`): where `rearranged_share` moves, fit that again, then this.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from lagom_overlap.cost.operators import load_framework, load_operators
from lagom_overlap.workload.parallel import Dispatcher
from measured_rows import Named, exit_code_of, interrupted, read, report_named, tried
from training_steps.case import COLUMNS, StepCase
from training_steps.jobs import case_of
from training_steps.judge import FITTED_FAMILY
from training_steps.predict import predicted

_SHARES: Final = (0.3, 0.35, 0.4, 0.5, 0.7)
_LAUNCHES_S: Final = (20e-6, 30e-6, 40e-6, 60e-6, 90e-6)
_FINE: Final = (41, 71)
"""Points of each axis among which the best is looked for, interpolated between those that were priced."""

Grid = NDArray[np.float64]
Errors = Mapping[StepCase, Grid]
Place = tuple[int, ...]


def _priced(case: StepCase) -> Grid:
    """Relative errors of a row on the fine grid."""
    framework, operators = load_framework("megatron"), load_operators(case.cluster.gpu)
    coarse = np.array(
        [
            [
                predicted(
                    case, replace(operators, rearranged_share=share), replace(framework, launch_s=launch_s)
                ).iteration_s
                for launch_s in _LAUNCHES_S
            ]
            for share in _SHARES
        ]
    )
    points = np.stack(np.meshgrid(*_axes(), indexing="ij"), axis=-1)
    found = RegularGridInterpolator((_SHARES, _LAUNCHES_S), coarse)(points)
    return np.asarray(found / case.measured_s - 1.0)


def _axes() -> list[Grid]:
    known = (_SHARES, _LAUNCHES_S)
    return [np.linspace(one[0], one[-1], num) for one, num in zip(known, _FINE, strict=True)]


def _is_unexplained(case: StepCase) -> bool:
    """Plain all-to-alls behind another micro-batch: in all families such jobs are too fast, not for their launches."""
    return case.layout.overlap_experts and case.layout.dispatcher is Dispatcher.ALL_TO_ALL


def _fit(errors: Errors, cases: Sequence[StepCase]) -> Place:
    """The place on the fine grid with the least mean absolute error."""
    mean = np.mean([np.abs(errors[case]) for case in cases], axis=0)
    return tuple(int(index) for index in np.unravel_index(int(np.argmin(mean)), mean.shape))


def _words(place: Place) -> str:
    share, launch_s = (axis[index] for axis, index in zip(_axes(), place, strict=True))
    return f"rearranged_share = {share:.3f}, launch_s = {launch_s * 1e6:.1f} us"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the fitted numbers, and every GPU's error under the fit without it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    arguments = parser.parse_args(argv)
    jobs: dict[object, StepCase] = {}
    _, rows, bad = read(arguments.file, COLUMNS)
    found = [tried(row, case_of) for row in rows]
    every = [case for case in found if isinstance(case, StepCase)]
    report_named(arguments.file, [*bad, *(one for one in found if isinstance(one, Named))], num_judged=len(every))
    for case in every:
        if case.family == FITTED_FAMILY and not _is_unexplained(case):
            jobs.setdefault(case.job, case)
    if not jobs:
        sys.stderr.write(f"fit_mixtures: no row of {FITTED_FAMILY}\n")
        return 2
    families: dict[str, list[StepCase]] = defaultdict(list)
    errors: dict[StepCase, Grid] = {}
    try:
        for number, case in enumerate(jobs.values()):
            sys.stderr.write(f"fit_mixtures: job {number + 1} of {len(jobs)}\n")
            errors[case] = _priced(case)
            families[case.cluster.name].append(case)
    except KeyboardInterrupt:
        known = _fitted(errors) if errors else "nothing is known"
        return interrupted("fit_mixtures", f"so far, {len(errors)} of {len(jobs)} jobs: {known}")
    print(f"{len(errors)} jobs: {_fitted(errors)}")
    left_out = []
    for gpu, cases in sorted(families.items() if len(families) > 1 else ()):
        found = _fit(errors, [case for case in errors if case.cluster.name != gpu])
        off = [100.0 * float(errors[case][found]) for case in cases]
        left_out += [abs(error) for error in off]
        print(f"without {gpu}: {_words(found)}; its rows {', '.join(f'{error:+.1f}' for error in off)} %")
    if left_out:
        print(f"left out: mean {fmean(left_out):.1f} %, worst {max(left_out):.1f} % of {len(left_out)} jobs")
    return 0


def _fitted(errors: Errors) -> str:
    """The fit on the jobs that are priced."""
    place = _fit(errors, list(errors))
    mean_pct = 100.0 * fmean(abs(float(found[place])) for found in errors.values())
    return f"{_words(place)}; mean error {mean_pct:.1f} %"


if __name__ == "__main__":
    sys.exit(exit_code_of("fit_mixtures", main))
