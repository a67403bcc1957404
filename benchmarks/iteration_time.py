"""Predicted against measured iteration times, for any file in the formats of the shared validation data.

    python benchmarks/iteration_time.py FILE.csv [--json]

Formats, told apart by their columns: vTrain (single node, or with a leading "Parameters (billion)"), the tables of
Narayanan et al. (SC'21, arXiv 2104.04473) and of arXiv 2201.11990, Table 5 of arXiv 2205.05198 (two measured times a
row), and published steps of torchtitan, Megatron-Bridge, NeMo and Megatron-LM (`training_steps`). Rows that a constant
was fitted on are marked; what was fitted on what: docs/accuracy.md.

Where a table has no such column: sequences of 2048 tokens, as many replicas as the GPUs give, micro-batches of one
sequence, a vocabulary of 51,200, no interleaving, PTD.

Every measured value is either predicted or named under `not_simulated` with the reason; `num_rows` counts both. A file
that is empty or damaged, or holds negative, infinite or missing figures, ends with one line and exit code 2.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Final

from lagom_overlap.cost.operators import FrameworkConstants, load_framework, load_operators
from lagom_overlap.cost.profile import load_profile
from lagom_overlap.errors import LagomError
from lagom_overlap.hardware import load_preset
from lagom_overlap.sim.training import TrainingSimulator
from lagom_overlap.units import MS, TFLOPS
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule, Recompute
from lagom_overlap.workload.parallel.layout import check_layout
from lagom_overlap.workload.precision import DType, Precision
from lagom_overlap.workload.step import Accumulation, load_rules
from measured_rows import BadFileError, header_of
from training_steps.judge import evaluate_steps

VOCAB: Final = 51_200
GPUS_PER_NODE: Final = 8
MAX_FILE_BYTES: Final = 1 << 26

_VTRAIN: Final = {
    "# GPUs": "gpus",
    "global batch": "global_batch",
    "micro batch": "microbatch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "seq",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
    "iteration time (ms)": "measured_ms",
    "Parameters (billion)": "params_B",
}
_COUNTS: Final = (
    "gpus", "global_batch", "microbatch", "hidden", "heads", "layers", "seq", "vocab", "tp", "dp", "pp", "interleave",
)  # fmt: skip
_NEEDED: Final = ("gpus", "global_batch", "hidden", "heads", "layers", "tp", "pp")
_SEQ: Final = 2048
_MEASURED: Final = (
    "measured_ms", "measured_iter_s", "derived_iter_s", "measured_full_recompute_s", "measured_seqpar_selective_s",
    "measured_tflops_per_gpu",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured value: where it stands, what ran, how long it took; `fitted` if a constant was fitted on it."""

    row: int
    what: str
    model: TransformerModel
    layout: ParallelLayout
    seq_len: int
    num_gpus: int
    framework: str
    measured_s: float
    reduction: DType = DType.FP16
    accumulation: Accumulation = Accumulation.ADDED
    fitted: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """A measured value that is not simulated, and why."""

    row: int
    what: str
    why: str


Values = dict[str, float]


def _number(text: str, column: str, row: int) -> float:
    try:
        value = float(text)
    except ValueError:
        raise BadFileError(f"row {row}: {column} is {text[:40]!r}, must be a number") from None
    if not isfinite(value) or value <= 0:
        raise BadFileError(f"row {row}: {column} is {text[:40]}, must be positive and finite")
    if column in _COUNTS and value != int(value):
        raise BadFileError(f"row {row}: {column} is {text[:40]}, must be a whole number")
    return value


def read_rows(path: Path) -> tuple[list[str], list[tuple[str, Values]]]:
    """The file's columns under our names, and per row its scheme ("" without one) and its numbers.

    Raises:
        BadFileError: if the file is missing, empty, no such table, or holds an impossible figure.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadFileError(f"{str(path)!r} has more than {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadFileError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise BadFileError(f"{str(path)!r} is not UTF-8 text (byte {error.start})") from None
    if "\0" in text:
        raise BadFileError(f"{str(path)!r} is not a CSV file: it holds zero bytes")
    lines = [line for line in csv.reader(text.splitlines()) if any(cell.strip() for cell in line)]
    if not lines:
        raise BadFileError(f"{str(path)!r} is empty")
    columns = [_VTRAIN.get(cell.strip(), cell.strip()) for cell in lines[0]]
    missing = [name for name in _NEEDED if name not in columns]
    if missing or not set(_MEASURED) & set(columns):
        what = f"no column {missing[0]!r}" if missing else f"none of the columns {', '.join(_MEASURED)}"
        raise BadFileError(f"{str(path)!r} is none of the known tables: {what}")
    if len(set(columns)) != len(columns):
        raise BadFileError(f"{str(path)!r} names a column twice")
    rows = []
    for number, cells in enumerate(lines[1:], start=1):
        if len(cells) != len(columns):
            raise BadFileError(f"row {number} has {len(cells)} values, the header has {len(columns)}")
        named = {name: cell.strip() for name, cell in zip(columns, cells, strict=True)}
        wanted = [name for name in columns if name in _COUNTS or name in _MEASURED]
        values = {name: _number(named[name], name, number) for name in wanted}
        values.setdefault("seq", _SEQ)
        values.setdefault("dp", max(1, values["gpus"] // (values["tp"] * values["pp"])))
        rows.append((named.get("scheme", ""), values))
    if not rows:
        raise BadFileError(f"{str(path)!r} has a header and no rows")
    return columns, rows


def _model(v: Values) -> TransformerModel:
    """A GPT of that size as Megatron trains it: dropout, learned positions, tied embeddings."""
    heads, hidden = int(v["heads"]), int(v["hidden"])
    if hidden % heads:
        raise BadFileError(f"hidden {hidden} is not a multiple of heads {heads}")
    return TransformerModel(
        name="gpt",
        num_layers=int(v["layers"]),
        hidden=hidden,
        ffn=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab=int(v.get("vocab", VOCAB)),
        gated=False,
        linear_bias=True,
        norm_bias=True,
        tied_embeddings=True,
        dropout=True,
        learned_positions=int(v["seq"]),
    )


def _layout(v: Values, recompute: Recompute) -> ParallelLayout:
    """What the columns say; without them micro-batches of one sequence and no interleaving."""
    chunks = int(v.get("interleave", 1))
    return ParallelLayout(
        tensor=int(v["tp"]),
        pipeline=int(v["pp"]),
        data=int(v["dp"]),
        micro_batch=int(v.get("microbatch", 1)),
        global_batch=int(v["global_batch"]),
        schedule=PipelineSchedule.INTERLEAVED if chunks > 1 else PipelineSchedule.ONE_F_ONE_B,
        chunks=chunks,
        recompute=recompute,
        flash_attention=False,
        scatter_gather=True,
    )


def seconds_of_tflops(v: Values) -> float:
    """The iteration time behind a printed TFLOP/s per GPU: arXiv 2104.04473, Eq. 3 (with recomputation)."""
    layers, hidden, seq, vocab = v["layers"], v["hidden"], v["seq"], v.get("vocab", VOCAB)
    flops = 96.0 * v["global_batch"] * seq * layers * hidden**2
    flops *= 1.0 + seq / (6.0 * hidden) + vocab / (16.0 * layers * hidden)
    return flops / (v["gpus"] * v["measured_tflops_per_gpu"] * TFLOPS)


def _vtrain_case(columns: Sequence[str], row: int, v: Values) -> Case:
    """A row of vTrain; the single-node ones show no recomputation and no accumulation (docs/accuracy.md)."""
    recompute = Recompute.FULL if "params_B" in columns else Recompute.NONE
    layout = _layout(v, recompute)
    return Case(
        row=row,
        what="vtrain",
        model=_model(v),
        layout=layout,
        seq_len=int(v["seq"]),
        num_gpus=int(v["gpus"]),
        framework="megatron_deepspeed",
        measured_s=v["measured_ms"] * MS,
        accumulation=Accumulation.FREE,
        fitted="params_B" not in columns and int(v["layers"]) == 12,
    )


def _table5_cases(row: int, v: Values) -> Iterator[Case]:
    """Table 5 of arXiv 2205.05198: a job recomputed in full, and selectively with sequence parallelism."""
    full = replace(_layout(v, Recompute.FULL), async_tensor=True)
    cut = replace(full, recompute=Recompute.SELECTIVE, sequence_parallel=int(v["tp"]) > 1, async_tensor=False)
    for what, layout in (("full_recompute", full), ("seqpar_selective", cut)):
        if f"measured_{what}_s" in v:
            yield Case(
                row=row,
                what=what,
                model=_model(v),
                layout=layout,
                seq_len=int(v["seq"]),
                num_gpus=int(v["gpus"]),
                framework="megatron",
                measured_s=v[f"measured_{what}_s"],
                accumulation=Accumulation.FUSED,
                reduction=DType.FP32,
            )


def _table_case(scheme: str, row: int, v: Values) -> Case | Refused:
    """SC'21 and MT-NLG: PTD in Megatron, ZeRO-3 in DeepSpeed, both with full recomputation."""
    zero = {"": 0, "PTD": 0, "PTD-P": 0, "ZeRO-3": 3}.get(scheme)
    if zero is None:
        return Refused(row, scheme, f"scheme is {scheme[:40]!r}; known: PTD, ZeRO-3")
    measured = v.get("measured_iter_s", v.get("derived_iter_s"))
    megatron = "megatron_deepspeed" if not scheme and "measured_iter_s" in v else "megatron"
    layout = replace(_layout(v, Recompute.FULL), zero_stage=zero)
    return Case(
        row=row,
        what=scheme or "PTD",
        model=_model(v),
        layout=layout,
        seq_len=int(v["seq"]),
        num_gpus=int(v["gpus"]),
        framework="deepspeed" if zero else megatron,
        measured_s=seconds_of_tflops(v) if measured is None else measured,
        fitted=zero == 3 and int(v["layers"]) == 96,
    )


def cases_of(columns: Sequence[str], rows: Sequence[tuple[str, Values]]) -> Iterator[Case | Refused]:
    """Every measured value of the file."""
    for row, (scheme, values) in enumerate(rows, start=1):
        try:
            if "measured_ms" in columns:
                yield _vtrain_case(columns, row, values)
            elif "measured_full_recompute_s" in columns or "measured_seqpar_selective_s" in columns:
                yield from _table5_cases(row, values)
            else:
                yield _table_case(scheme, row, values)
        except (LagomError, BadFileError) as error:
            yield Refused(row, scheme, " ".join(str(error).split()))


def predict(case: Case, framework: FrameworkConstants | None = None) -> float:
    """The predicted iteration time in seconds; `framework` instead of the case's own.

    Raises:
        LagomError: if the layout cannot be built.
    """
    per_node = min(GPUS_PER_NODE, case.num_gpus)
    nodes, rest = divmod(case.num_gpus, per_node)
    cluster = replace(load_preset("a100_dgx", nodes + bool(rest)), gpus_per_node=per_node)
    check_layout(case.model, case.layout, cluster, case.seq_len)
    rules = load_rules(case.framework)
    simulator = TrainingSimulator(
        case.model,
        case.layout,
        seq_len=case.seq_len,
        cluster=cluster,
        operators=load_operators(cluster.gpu),
        framework=framework or load_framework(case.framework),
        profile=load_profile("plausible"),
        rules=replace(rules, accumulation=case.accumulation),
        precision=Precision(DType.FP16, DType.FP16, case.reduction),
    )
    return simulator.times().iteration_s


def _is_step_table(path: Path) -> bool:
    """Whether a file has published steps, by columns that no other format has; what it lacks is said by its reader."""
    return bool({"framework", "gpu_type"} & set(header_of(path)))


def evaluate(path: Path) -> dict[str, object]:
    """The JSON object of a file.

    Raises:
        BadFileError: if the file is damaged.
    """
    if _is_step_table(path):
        return evaluate_steps(path)
    columns, table = read_rows(path)
    rows: list[dict[str, object]] = []
    refused: list[dict[str, object]] = []
    errors: dict[bool, list[float]] = {True: [], False: []}
    for case in cases_of(columns, table):
        if isinstance(case, Case):
            try:
                predicted_s = predict(case)
            except LagomError as error:
                case = Refused(case.row, case.what, " ".join(str(error).split()))  # noqa: PLW2901
            else:
                error_pct = 100.0 * (predicted_s / case.measured_s - 1.0)
                errors[case.fitted].append(abs(error_pct))
                rows.append(
                    {
                        "row": case.row,
                        "what": case.what,
                        "measured_s": case.measured_s,
                        "predicted_s": predicted_s,
                        "error_pct": error_pct,
                        "fitted": case.fitted,
                    }
                )
                continue
        refused.append({"row": case.row, "what": case.what, "why": case.why})
    return {
        "num_rows": len(rows) + len(refused),
        "mean_abs_error_pct": _mean([*errors[True], *errors[False]]),
        "mean_abs_error_not_fitted_pct": _mean(errors[False]),
        "num_fitted": len(errors[True]),
        "rows": rows,
        "not_simulated": refused,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison; exit code 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE.csv")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    arguments = parser.parse_args(argv)
    try:
        result = evaluate(arguments.file)
    except BadFileError as error:
        sys.stderr.write(f"iteration_time: {' '.join(str(error).split())}\n")
        return 2
    if arguments.json:
        print(json.dumps(result))
        return 0
    for row in result["rows"]:  # type: ignore[attr-defined]  # the object is for JSON, its values are of many types
        mark = "  (fitted on)" if row["fitted"] else ""
        print(
            f"row {row['row']:>4} {row['what']:<18} measured {row['measured_s']:>9.4f} s  "
            f"predicted {row['predicted_s']:>9.4f} s  {row['error_pct']:+6.1f} %{mark}"
        )
    for row in result["not_simulated"]:  # type: ignore[attr-defined]  # as above
        print(f"row {row['row']:>4} {row['what']:<18} not simulated: {row['why']}")
    for kind in ("groups", "families"):
        for name, found in result.get(kind, {}).items():  # type: ignore[attr-defined]  # as above
            print(
                f"{name}: {found['num_rows']} rows, {found['mean_abs_error_pct']:.1f} % mean, "
                f"worst {found['worst_pct']:+.1f} %, bias {found['bias_pct']:+.1f} %"
            )
    for key in ("torchtitan_without_compile", "release_floor_pct"):
        if key in result:
            print(f"{key}: {result[key]}")
    for key in ("num_rows", "num_fitted", "mean_abs_error_pct", "mean_abs_error_not_fitted_pct"):
        print(f"{key}: {result[key]}")
    print(f"not simulated: {len(result['not_simulated'])}")  # type: ignore[arg-type]  # as above
    return 0


if __name__ == "__main__":
    sys.exit(main())
