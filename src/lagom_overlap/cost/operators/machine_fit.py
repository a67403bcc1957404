"""Operator constants fitted to a profile of this machine: measured operators T_i and their chunks.

A machine is a GPU of `NUM_SLICES` equal slices without tiles that matter: the product takes flops over its rate, or
its bytes over the memory's, whichever is longer, blended (`gemm.py` with q = 0, p = 2 and one rate); attention has a
rate of its own; a memory-bound operator takes its bytes over the streaming bandwidth and a call. Chunks are the same
operator on a half and a quarter of its rows, heads or bytes: they tell a call's own cost from its rate.

Held out: each operator is predicted by a fit that saw neither it nor its chunks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Final

from lagom_overlap.cost.fit import Constant, Fit, fit_constants
from lagom_overlap.cost.operators.constants import OperatorConstants
from lagom_overlap.cost.operators.gemm import GemmConstants
from lagom_overlap.cost.operators.times import OperatorTimes
from lagom_overlap.hardware import Gpu
from lagom_overlap.units import GB_PER_S, US
from lagom_overlap.workload import Attention, Gemm, MemoryBound

NUM_SLICES: Final = 8
"""Shares of a machine that the simulator may take away from computation."""
PIECES: Final = (1, 2, 4)
_RATE: Final = 50e9
_SPAN: Final = 1e3
"""A constant may be so many times its start, or that part of it."""
_UNSPLIT_S: Final = 1e6
"""A CPU's product is never split along its inner dimension."""
_ATTENTION_ROWS: Final = 8
"""A core has no SM to leave idle: blocks so small that every attention fills the slices."""

MachineWork = Gemm | Attention | MemoryBound


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledOperator:
    """A measured operator, whole or a chunk: what it is a chunk of, in how many pieces, its seconds."""

    whole: MachineWork
    pieces: int
    work: MachineWork
    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"{self.work} took {self.seconds} s, must be positive and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFit(Fit):
    """The fitted constants of a machine; the residuals are its operators'."""

    constants: OperatorConstants


def chunk_of(work: MachineWork, pieces: int) -> MachineWork | None:
    """One of that many equal pieces: rows of a product, heads of an attention, bytes; None where it does not divide."""
    match work:
        case Gemm():
            return None if work.m % pieces else replace(work, m=work.m // pieces)
        case Attention():
            heads = work.batch * work.num_heads
            return None if heads % pieces else replace(work, batch=1, num_heads=heads // pieces)
        case MemoryBound():
            return None if work.num_bytes < pieces else MemoryBound(work.num_bytes // pieces)


def machine_gpu(constants: OperatorConstants) -> Gpu:
    """The machine as the contention model sees it; rates follow the constants."""
    return Gpu(
        name=constants.name,
        num_sms=NUM_SLICES,
        gemm_flops=constants.gemm.tile_flops[0] * NUM_SLICES,
        hbm_bytes_per_s=constants.stream_bytes_per_s,
        l2_bytes=1 << 20,
        memory_bytes=1 << 33,
    )


_NAMES: Final = ("gemm_flops", "gemm_call_s", "gemm_bytes_per_s", "attention_flops", "stream_bytes_per_s", "touch_s")
_STARTS: Final = (_RATE, 5 * US, 10 * GB_PER_S, _RATE, 10 * GB_PER_S, 5 * US)


def _build(name: str, values: dict[str, float]) -> OperatorConstants:
    """Rates are of FP32 in `values` and of 2-byte elements in the constants, as all files have them."""
    per_slice = 2.0 * values["gemm_flops"] / NUM_SLICES
    return OperatorConstants(
        name=name,
        fitted_on="a profile of this machine",
        gemm=GemmConstants(
            tile_flops=(per_slice, per_slice, per_slice),
            launch_s=values["gemm_call_s"],
            split_s=_UNSPLIT_S,
            bytes_per_s=values["gemm_bytes_per_s"],
            norm=2.0,
            quantisation=0.0,
            l2_share=1e-9,
            l2_speedup=1.0,
        ),
        stream_bytes_per_s=values["stream_bytes_per_s"],
        reduction_bytes_per_s=values["stream_bytes_per_s"],
        touch_s=values["touch_s"],
        attention_flops=2.0 * values["attention_flops"],
        peak_flops=2.0 * values["gemm_flops"],
        attention_rows=_ATTENTION_ROWS,
    )


def fit_machine(name: str, operators: Sequence[ProfiledOperator]) -> MachineFit:
    """The constants that explain the profile best.

    Raises:
        ValueError: if there is no operator.
    """
    if not operators:
        raise ValueError("no profiled operator to fit")

    def built(values: Sequence[float]) -> OperatorConstants:
        return _build(name, dict(zip(_NAMES, values, strict=True)))

    def residuals(values: Sequence[float]) -> list[float]:
        return _residuals(operators, built(values))

    wanted = [Constant(n, at, at / _SPAN, at * _SPAN) for n, at in zip(_NAMES, _STARTS, strict=True)]
    table = fit_constants(residuals, wanted)
    constants = built([constant.value for constant in table])
    return MachineFit(constants=constants, table=table, log_residuals=tuple(_residuals(operators, constants)))


def predicted_seconds(work: MachineWork, constants: OperatorConstants) -> float:
    """The time of a work alone."""
    return OperatorTimes(machine_gpu(constants), constants).seconds(work)


def _residuals(operators: Iterable[ProfiledOperator], constants: OperatorConstants) -> list[float]:
    times = OperatorTimes(machine_gpu(constants), constants)
    return [log(times.seconds(operator.work) / operator.seconds) for operator in operators]


def held_out(name: str, operators: Sequence[ProfiledOperator]) -> list[float | None]:
    """The relative error of each operator under a fit without it and its chunks; None where its kind has no other."""
    errors: list[float | None] = []
    known: dict[MachineWork, OperatorConstants | None] = {}
    for operator in operators:
        if operator.whole not in known:
            rest = [other for other in operators if other.whole != operator.whole]
            alike = any(isinstance(other.whole, type(operator.whole)) for other in rest)
            known[operator.whole] = fit_machine(name, rest).constants if alike else None
        constants = known[operator.whole]
        if constants is None:
            errors.append(None)
        else:
            errors.append(predicted_seconds(operator.work, constants) / operator.seconds - 1.0)
    return errors
