"""Measured iterations in three older formats: vTrain, SC'21 with MT-NLG, and Table 5 of arXiv 2205.05198.

Where a table has no such column: sequences of 2048 tokens, as many replicas as the GPUs give, micro-batches of one
sequence, a vocabulary of 51,200, no interleaving, PTD.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from lagom_overlap.cost.operators import FrameworkConstants, load_framework, load_operators
from lagom_overlap.cost.profile import load_profile
from lagom_overlap.hardware import load_preset
from lagom_overlap.sim.training import TrainingSimulator
from lagom_overlap.units import MS, TFLOPS
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout, PipelineSchedule, Recompute
from lagom_overlap.workload.parallel.layout_check import check_layout
from lagom_overlap.workload.precision import DType, Precision
from lagom_overlap.workload.step import Accumulation, load_rules
from measured_limits import check_forwards, check_step
from measured_rows import BadFileError, BadRowError, Row, check_twice

VOCAB: Final = 51_200
GPUS_PER_NODE: Final = 8
PRECISION: Final = Precision(DType.FP16, DType.FP16)

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

    line: int
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


Values = dict[str, float]


def columns_of(path: Path, header: Sequence[str]) -> tuple[str, ...]:
    """The columns under our names.

    Raises:
        BadFileError: if what must be there is not.
    """
    columns = tuple(_VTRAIN.get(name, name) for name in header)
    check_twice(path, columns)
    missing = [name for name in _NEEDED if name not in columns]
    if missing or not set(_MEASURED) & set(columns):
        what = f"no column {missing[0]!r}" if missing else f"none of the columns {', '.join(_MEASURED)}"
        raise BadFileError(f"{str(path)!r} is none of the known tables: {what}")
    return columns


def renamed(row: Row) -> Row:
    """The row under our names."""
    return Row(row.line, {_VTRAIN.get(name, name): cell for name, cell in row.cells.items()})


def _values(row: Row) -> Values:
    """The counts of a row, those that the table lacks by their defaults.

    Raises:
        BadRowError: if one is wrong, or one that the table has is empty.
    """
    values: Values = {name: row.needed_count(name) for name in _COUNTS if name in row.cells}
    values.setdefault("seq", _SEQ)
    values.setdefault("dp", max(1, values["gpus"] // (values["tp"] * values["pp"])))
    return values


def _model(v: Values) -> TransformerModel:
    """A GPT of that size as Megatron trains it: dropout, learned positions, tied embeddings."""
    heads, hidden = int(v["heads"]), int(v["hidden"])
    if hidden % heads:
        raise BadRowError(f"hidden {hidden} is not a multiple of heads {heads}")
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


def _vtrain_case(row: Row) -> Case:
    """A row of vTrain; the single-node ones show no recomputation and no accumulation (docs/accuracy.md)."""
    v = _values(row)
    recompute = Recompute.FULL if "params_B" in row.cells else Recompute.NONE
    return Case(
        line=row.line,
        what="vtrain",
        model=_model(v),
        layout=_layout(v, recompute),
        seq_len=int(v["seq"]),
        num_gpus=int(v["gpus"]),
        framework="megatron_deepspeed",
        measured_s=row.needed("measured_ms") * MS,
        accumulation=Accumulation.FREE,
        fitted="params_B" not in row.cells and int(v["layers"]) == 12,
    )


def _table5_case(row: Row, what: str) -> Case:
    """Table 5 of arXiv 2205.05198: a job recomputed in full, and selectively with sequence parallelism."""
    v = _values(row)
    layout = replace(_layout(v, Recompute.FULL), async_tensor=True)
    if what == "seqpar_selective":
        layout = replace(layout, recompute=Recompute.SELECTIVE, sequence_parallel=int(v["tp"]) > 1, async_tensor=False)
    return Case(
        line=row.line,
        what=what,
        model=_model(v),
        layout=layout,
        seq_len=int(v["seq"]),
        num_gpus=int(v["gpus"]),
        framework="megatron",
        measured_s=row.needed(f"measured_{what}_s"),
        accumulation=Accumulation.FUSED,
        reduction=DType.FP32,
    )


def _table_case(row: Row) -> Case:
    """SC'21 and MT-NLG: PTD in Megatron, ZeRO-3 in DeepSpeed, both with full recomputation."""
    v, scheme = _values(row), row.text("scheme")
    zero = {"": 0, "PTD": 0, "PTD-P": 0, "ZeRO-3": 3}.get(scheme)
    if zero is None:
        raise BadRowError(f"scheme is {scheme[:40]!r}; known: PTD, ZeRO-3")
    measured = row.number("measured_iter_s") or row.number("derived_iter_s")
    if measured is None:
        tflops = row.number("measured_tflops_per_gpu")
        if tflops is None:
            raise BadRowError("nothing measured: " + ", ".join(_MEASURED[1:3] + _MEASURED[-1:]) + " are empty")
        measured = seconds_of_tflops(v | {"measured_tflops_per_gpu": tflops})
    megatron = "megatron_deepspeed" if not scheme and "measured_iter_s" in row.cells else "megatron"
    layout = replace(_layout(v, Recompute.FULL), zero_stage=zero)
    return Case(
        line=row.line,
        what=scheme or "PTD",
        model=_model(v),
        layout=layout,
        seq_len=int(v["seq"]),
        num_gpus=int(v["gpus"]),
        framework="deepspeed" if zero else megatron,
        measured_s=measured,
        fitted=zero == 3 and int(v["layers"]) == 96,
    )


def builders_of(columns: Sequence[str], row: Row) -> tuple[tuple[str, Callable[[Row], Case]], ...]:
    """What was measured of a row, and how its case is made."""
    if "measured_ms" in columns:
        return (("vtrain", _vtrain_case),)
    both = [what for what in ("full_recompute", "seqpar_selective") if f"measured_{what}_s" in columns]
    if both:
        return tuple((what, partial(_table5_case, what=what)) for what in both)
    return ((row.text("scheme")[:40], _table_case),)


def checked(case: Case) -> Case:
    """The case, if its measured time can be.

    Raises:
        BadRowError: if it cannot.
        NotModelledError: if its simulation would take too long.
    """
    check_forwards(case.layout)
    check_step(
        case.measured_s,
        case.model,
        num_tokens=case.layout.global_batch * case.seq_len,
        num_gpus=case.num_gpus,
        gpu=load_preset("a100_dgx").gpu,
        precision=PRECISION,
    )
    return case


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
        precision=replace(PRECISION, reduction=case.reduction),
    )
    return simulator.times().iteration_s
