"""Fits a GPU's operator constants on vidur's profile of Phi-2; every other model is held out (`operator_time.py`).

    python benchmarks/fit_operators.py a100_phi2_mlp.csv --gpu A100

Products: ten numbers by Nelder-Mead on the mean absolute log error, from six starts, with a soft fence of e^1.2 around
the start (what the data do not decide stays where it began). Memory-bound operators: the median bandwidth over the rows
with at least 2048 tokens, less 2 us per kernel; smaller tensors live in the L2, which no training step's do.
The formula is that of `cost.operators.gemm`, over arrays; the two are compared before anything is printed.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from lagom_overlap.cost.operators.gemm import SPLITS, TILES, GemmConstants, gemm_time
from lagom_overlap.hardware import Gpu, load_preset
from lagom_overlap.workload import Access, Gemm
from measured_rows import BadFileError, exit_code_of, interrupted
from operator_time import PRESET_OF, Sample, read_samples

Array = NDArray[np.float64]
STARTS: Final = 6
FENCE: Final = 1.2
TOUCH_S: Final = 2e-6
FROM_TOKENS: Final = 2048


def constants_of(point: Array) -> GemmConstants:
    """The constants at a point of the search: logarithms, of norm - 1 and the odds of the quantisation too."""
    rates, (launch, split, bandwidth) = np.exp(point[:3]), np.exp(point[3:6])
    return GemmConstants(
        tile_flops=(float(rates[0]), float(rates[1]), float(rates[2])),
        launch_s=float(launch),
        split_s=float(split),
        bytes_per_s=float(bandwidth),
        norm=1.0 + float(np.exp(point[6])),
        quantisation=float(1.0 / (1.0 + np.exp(-point[7]))),
        l2_share=float(np.exp(point[8])),
        l2_speedup=float(np.exp(point[9])),
    )


def times(c: GemmConstants, m: Array, n: Array, k: Array, gpu: Gpu) -> Array:
    """`gemm_time` over arrays of shapes."""
    l2_rate = c.bytes_per_s * c.l2_speedup
    num_bytes = 2.0 * (m * k + n * k + m * n)
    hit = np.minimum(1.0, c.l2_share * gpu.l2_bytes / num_bytes)
    memory_s = num_bytes * ((1.0 - hit) / c.bytes_per_s + hit / l2_rate)
    best = np.full(m.shape, np.inf)
    for (rows, columns), place in zip(TILES, (0, 1, 1, 2), strict=True):
        tiles = np.ceil(m / rows) * np.ceil(n / columns)
        store_s = rows * columns * 2 * gpu.num_sms / l2_rate
        for split in SPLITS:
            fluid = tiles * split / gpu.num_sms
            waves = np.maximum(1.0, fluid + c.quantisation * (np.ceil(fluid) - fluid))
            tile_s = 2.0 * rows * columns * k / split / c.tile_flops[place] + store_s * (1 if split == 1 else 2)
            alone_s = c.launch_s + ((waves * tile_s) ** c.norm + memory_s**c.norm) ** (1.0 / c.norm)
            if split > 1:
                alone_s = alone_s + c.split_s + 8.0 * m * n * split / l2_rate
            best = np.minimum(best, alone_s)
    return best


def fit_products(
    samples: Sequence[Sample], gpu: Gpu, seen: list[tuple[float, Array]] | None = None
) -> tuple[GemmConstants, float]:
    """The constants and their mean error on the samples; `seen` gets every loss that is the least so far."""
    gemms = [(sample.work, sample.measured_s) for sample in samples if isinstance(sample.work, Gemm)]
    if not gemms:
        raise BadFileError("the file has no time of a matrix product")
    m, n, k = (np.array([getattr(work, name) for work, _ in gemms], float) for name in ("m", "n", "k"))
    measured = np.array([seconds for _, seconds in gemms])
    rate = gpu.gemm_flops / gpu.num_sms
    start = np.array(
        [
            *np.log([rate, 0.95 * rate, 0.8 * rate, 4e-6, 4e-6, 0.85 * gpu.hbm_bytes_per_s, 2.0]),
            1.0,
            *np.log([0.5, 2.5]),
        ]
    )

    def loss(point: Array) -> float:
        ratio = times(constants_of(point), m, n, k, gpu) / measured
        outside = np.maximum(0.0, np.abs(point - start) - FENCE)
        value = float(np.mean(np.abs(np.log(ratio))) + 0.02 * np.sum(outside))
        if seen is not None and (not seen or value < seen[-1][0]):
            seen.append((value, point.copy()))
        return value

    rng, best = np.random.default_rng(0), None
    options = {"maxfev": 2500, "xatol": 1e-3, "fatol": 1e-5, "adaptive": True}
    for index in range(STARTS):
        begin = start + (rng.normal(0.0, 0.12, start.size) if index else 0.0)
        found: Any = minimize(loss, begin, method="Nelder-Mead", options=options)
        best = found if best is None or found.fun < best.fun else best
    assert best is not None
    constants = constants_of(best.x)
    predicted = times(constants, m, n, k, gpu)
    for place in range(0, len(gemms), 97):
        shape = (int(m[place]), int(n[place]), int(k[place]))
        one = gemm_time(shape, num_sms=gpu.num_sms, l2_bytes=gpu.l2_bytes, constants=constants).alone_s
        assert abs(one / predicted[place] - 1.0) < 1e-9, "the two forms of the formula have come apart"
    return constants, float(np.mean(np.abs(predicted / measured - 1.0)))


def bandwidths(samples: Sequence[Sample]) -> dict[Access, float]:
    """The median bandwidth per kind of access over large tensors."""
    found: dict[Access, list[float]] = {access: [] for access in Access}
    for sample in samples:
        if not isinstance(sample.work, Gemm) and sample.num_tokens >= FROM_TOKENS:
            found[sample.work.access].append(sample.work.num_bytes / (sample.measured_s - TOUCH_S))
    return {access: float(np.median(values)) for access, values in found.items() if values}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the constants as they stand in the GPU's data file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    parser.add_argument("--gpu", required=True, choices=sorted(PRESET_OF))
    arguments = parser.parse_args(argv)
    gpu = load_preset(PRESET_OF[arguments.gpu]).gpu
    samples = read_samples(arguments.file, gpu)
    seen: list[tuple[float, Array]] = []
    try:
        constants, error = fit_products(samples, gpu, seen)
    except KeyboardInterrupt:
        if not seen:
            return interrupted("fit_operators", "so far, nothing is known")
        loss, point = min(seen, key=lambda one: one[0])
        return interrupted("fit_operators", f"so far, loss {loss:.4f}: {constants_of(point)}")
    for access, value in bandwidths(samples).items():
        print(f"{access}_bytes_per_s = {value:.4g}")
    print(f"touch_s = {TOUCH_S:.4g}\n\n[gemm]   # mean error on the fitted rows {100 * error:.2f} %")
    print(f"tile_flops = [{', '.join(f'{rate:.4g}' for rate in constants.tile_flops)}]")
    for name in ("launch_s", "split_s", "bytes_per_s", "norm", "quantisation", "l2_share", "l2_speedup"):
        print(f"{name} = {getattr(constants, name):.4g}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of("fit_operators", main))
