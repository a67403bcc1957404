"""Predicted against measured times of single operators, for any file in the format of vidur's MLP profiles.

    python benchmarks/operator_time.py a100_llama2_7b_mlp.csv --gpu A100 [--json]

Matrix products are the four of a layer; memory-bound operators are the activation, the addition and the norms (bytes
counted by hand). Constants were fitted on Phi-2 (`fit_operators.py`); every other model is held out.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lagom_overlap.cost.operators import OperatorTimes, load_operators
from lagom_overlap.hardware import Gpu, load_preset
from lagom_overlap.units import MS
from lagom_overlap.workload import Access, Gemm, MemoryBound
from measured_limits import check_possible, product_floor_s
from measured_rows import TIME_MS, BadRowError, Named, Row, decimal, exit_code_of, read, report_named, tried

PRESET_OF: Final = {"A100": "a100_dgx", "A40": "a40_nvlink", "H100": "h100_dgx", "H200": "h200"}
NEEDED: Final = (
    "n_head", "n_kv_head", "n_embd", "n_expanded_embd", "use_gated_mlp", "num_tokens", "num_tensor_parallel_workers",
)  # fmt: skip
BANDS: Final = ((1, 64), (64, 512), (512, 1024), (1024, 2048), (2048, 1 << 30))


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured operator: its name in the file, tokens, tensor-parallel width, what it does, how long it took."""

    name: str
    num_tokens: int
    tensor: int
    work: Gemm | MemoryBound
    measured_s: float


def _works(row: Row) -> dict[str, Gemm | MemoryBound]:
    """What a row's operators do.

    Raises:
        BadRowError: if its shapes are wrong.
    """
    m, tp, h = (row.needed_count(name) for name in ("num_tokens", "num_tensor_parallel_workers", "n_embd"))
    heads, kv_heads, expanded = (row.needed_count(name) for name in ("n_head", "n_kv_head", "n_expanded_embd"))
    gated = {"True": True, "False": False}.get(row.text("use_gated_mlp"))
    if gated is None:
        raise BadRowError(f"use_gated_mlp is {row.text('use_gated_mlp')[:40]!r}, must be True or False")
    for name, size in (
        ("n_embd", h),
        ("n_expanded_embd", expanded),
        ("n_embd x n_kv_head / n_head", h * kv_heads // heads),
    ):
        if size < tp or size % tp:
            raise BadRowError(f"num_tensor_parallel_workers is {tp}, must divide {name} ({size})")
    ffn = expanded // tp
    return {
        "attn_pre_proj": Gemm(m, (h + 2 * h * kv_heads // heads) // tp, h),
        "attn_post_proj": Gemm(m, h, h // tp),
        "mlp_up_proj": Gemm(m, (2 if gated else 1) * ffn, h),
        "mlp_down_proj": Gemm(m, h, ffn),
        "mlp_act": MemoryBound((6 if gated else 4) * m * ffn, Access.STREAM),
        # One norm a layer (Phi-2): attention and MLP are both added to the residual.
        "add": MemoryBound((6 if "time_stats.post_attention_layernorm.median" in row.cells else 12) * m * h),
        "input_layernorm": MemoryBound(4 * m * h, Access.REDUCTION),
        "post_attention_layernorm": MemoryBound(4 * m * h, Access.REDUCTION),
    }


def read_samples(path: Path, gpu: Gpu) -> list[Sample]:
    """Every operator of every row that the file has a time for; wrong rows are named on standard error.

    Raises:
        BadFileError: if the file is missing, empty or no profile, or no row can be used.
    """
    _, rows, named = read(path, NEEDED)
    samples: list[Sample] = []
    for row in rows:
        found = tried(row, lambda row: list(_samples_of(row, gpu)))
        if isinstance(found, Named):
            named.append(found)
        else:
            samples += found
    report_named(path, named, num_judged=len(samples))
    return samples


def _samples_of(row: Row, gpu: Gpu) -> Iterator[Sample]:
    num_found = 0
    for name, work in _works(row).items():
        column = f"time_stats.{name}.median"
        if not (text := row.text(column)):
            continue
        measured_s = decimal(text, column, TIME_MS) * MS
        if isinstance(work, Gemm):
            check_possible(column, measured_s, product_floor_s((work.m, work.n, work.k), gpu), "the product")
        yield Sample(name, row.needed_count("num_tokens"), row.needed_count(NEEDED[-1]), work, measured_s)
        num_found += 1
    if not num_found:
        raise BadRowError("no time_stats.<operator>.median is printed")


def evaluate(samples: Sequence[Sample], gpu: Gpu) -> dict[str, object]:
    """Mean absolute error in per cent of all products, by operator, and by number of tokens."""
    times = OperatorTimes(gpu, load_operators(gpu))
    by_name: dict[str, list[float]] = defaultdict(list)
    by_band: dict[str, list[float]] = defaultdict(list)
    products = []
    for sample in samples:
        error = 100.0 * (times.seconds(sample.work) / sample.measured_s - 1.0)
        by_name[sample.name].append(error)
        if isinstance(sample.work, Gemm):
            products.append(error)
            low = next(low for low, high in BANDS if low <= sample.num_tokens < high)
            by_band[f"tokens from {low}"].append(error)
    return {
        "num_products": len(products),
        "mean_abs_error_pct": _mean_abs(products),
        "by_operator": {name: _row(errors) for name, errors in by_name.items()},
        "products_by_tokens": {name: _row(errors) for name, errors in sorted(by_band.items(), key=lambda i: len(i[0]))},
    }


def _mean_abs(errors: Sequence[float]) -> float | None:
    return sum(map(abs, errors)) / len(errors) if errors else None


def _row(errors: Sequence[float]) -> dict[str, float | None]:
    return {"num": len(errors), "mean_abs_error_pct": _mean_abs(errors), "mean_error_pct": sum(errors) / len(errors)}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison; exit code 2 for a file of which nothing can be judged."""
    return exit_code_of("operator_time", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    parser.add_argument("--gpu", required=True, choices=sorted(PRESET_OF))
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args(argv)
    gpu = load_preset(PRESET_OF[arguments.gpu]).gpu
    result = evaluate(read_samples(arguments.file, gpu), gpu)
    if arguments.json:
        print(json.dumps(result))
        return 0
    if result["num_products"]:
        print(f"{result['num_products']} products: mean error {result['mean_abs_error_pct']:.2f} %")
    for part in ("by_operator", "products_by_tokens"):
        for name, row in result[part].items():  # type: ignore[attr-defined]  # the object is for JSON
            print(
                f"  {name:<26}{row['num']:>6}  {row['mean_abs_error_pct']:6.2f} %  bias {row['mean_error_pct']:+6.2f} %"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
