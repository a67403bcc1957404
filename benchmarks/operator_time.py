"""Predicted against measured times of single operators, for any file in the format of vidur's MLP profiles.

    python benchmarks/operator_time.py a100_llama2_7b_mlp.csv --gpu A100 [--json]

Matrix products are the four of a layer; memory-bound operators are the activation, the addition and the norms (bytes
counted by hand). Constants were fitted on Phi-2 (`fit_operators.py`); every other model is held out.
"""

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final

from lagom_overlap.cost.operators import OperatorTimes, load_operators
from lagom_overlap.hardware import Gpu, load_preset
from lagom_overlap.units import MS
from lagom_overlap.workload import Access, Gemm, MemoryBound

PRESET_OF: Final = {"A100": "a100_dgx", "A40": "a40_nvlink", "H100": "h100_dgx", "H200": "h200"}
NEEDED: Final = (
    "n_head", "n_kv_head", "n_embd", "n_expanded_embd", "use_gated_mlp", "num_tokens", "num_tensor_parallel_workers",
)  # fmt: skip
BANDS: Final = ((1, 64), (64, 512), (512, 1024), (1024, 2048), (2048, 1 << 30))


class BadFileError(Exception):
    """Raised for a file that is no profile; one line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured operator: its name in the file, tokens, tensor-parallel width, what it does, how long it took."""

    name: str
    num_tokens: int
    tensor: int
    work: Gemm | MemoryBound
    measured_s: float


def _works(row: dict[str, str]) -> dict[str, Gemm | MemoryBound]:
    m, tp, h = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"]), int(row["n_embd"])
    ffn, gated = int(row["n_expanded_embd"]) // tp, row["use_gated_mlp"] == "True"
    heads, kv_heads = int(row["n_head"]), int(row["n_kv_head"])
    return {
        "attn_pre_proj": Gemm(m, (h + 2 * h * kv_heads // heads) // tp, h),
        "attn_post_proj": Gemm(m, h, h // tp),
        "mlp_up_proj": Gemm(m, (2 if gated else 1) * ffn, h),
        "mlp_down_proj": Gemm(m, h, ffn),
        "mlp_act": MemoryBound((6 if gated else 4) * m * ffn, Access.STREAM),
        # One norm a layer (Phi-2): attention and MLP are both added to the residual.
        "add": MemoryBound((6 if "time_stats.post_attention_layernorm.median" in row else 12) * m * h),
        "input_layernorm": MemoryBound(4 * m * h, Access.REDUCTION),
        "post_attention_layernorm": MemoryBound(4 * m * h, Access.REDUCTION),
    }


def read_samples(path: Path) -> list[Sample]:
    """Every operator of every row that the file has a time for.

    Raises:
        BadFileError: if the file is missing, empty, no profile, or holds an impossible figure.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(f"{str(path)!r} cannot be read: {error}") from None
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise BadFileError(f"{str(path)!r} is no vidur MLP profile: no column {missing[0]!r}")
    samples = [sample for number, row in enumerate(reader, start=1) for sample in _samples_of(number, row)]
    if not samples:
        raise BadFileError(f"{str(path)!r} has a header and no rows")
    return samples


def _samples_of(number: int, row: dict[str, str]) -> Iterator[Sample]:
    try:
        works = _works(row)
        for name, work in works.items():
            text = row.get(f"time_stats.{name}.median")
            if not text:
                continue
            measured_s = float(text) * MS
            if not (isfinite(measured_s) and measured_s > 0):
                raise BadFileError(f"row {number}: time of {name} is {text[:40]}, must be positive and finite")
            tokens, tensor = int(row["num_tokens"]), int(row["num_tensor_parallel_workers"])
            yield Sample(name, tokens, tensor, work, measured_s)
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise BadFileError(f"row {number}: {error}") from None


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


def _mean_abs(errors: Sequence[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


def _row(errors: Sequence[float]) -> dict[str, float]:
    return {"num": len(errors), "mean_abs_error_pct": _mean_abs(errors), "mean_error_pct": sum(errors) / len(errors)}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison; exit code 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    parser.add_argument("--gpu", required=True, choices=sorted(PRESET_OF))
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args(argv)
    try:
        result = evaluate(read_samples(arguments.file), load_preset(PRESET_OF[arguments.gpu]).gpu)
    except BadFileError as error:
        sys.stderr.write(f"operator_time: {' '.join(str(error).split())}\n")
        return 2
    if arguments.json:
        print(json.dumps(result))
        return 0
    print(f"{result['num_products']} products: mean error {result['mean_abs_error_pct']:.2f} %")
    for part in ("by_operator", "products_by_tokens"):
        for name, row in result[part].items():  # type: ignore[attr-defined]  # the object is for JSON
            print(
                f"  {name:<26}{row['num']:>6}  {row['mean_abs_error_pct']:6.2f} %  bias {row['mean_error_pct']:+6.2f} %"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
