"""Constants of a machine from measured operators and chunks: recovered where made up, silent where nothing tells."""

from dataclasses import replace

import pytest

from lagom_overlap.cost.operators.machine_fit import (
    PIECES,
    MachineWork,
    ProfiledOperator,
    chunk_of,
    fit_machine,
    held_out,
    machine_gpu,
    predicted_seconds,
)
from lagom_overlap.workload import Attention, Gemm, MemoryBound

FLOPS, BYTES_PER_S, CALL_S = 80e9, 12e9, 3e-6
GEMMS = [Gemm(256, n, k, 4) for n in (512, 1536, 2048) for k in (512, 2048)]
ATTENTION = Attention(batch=2, num_heads=8, seq_len=256, head_dim=64, element_bytes=4)
MEMORY = [MemoryBound(1 << size) for size in (16, 20, 22, 24)]


def true_seconds(work: MachineWork) -> float:
    """A machine written down by hand: rates, and a call."""
    match work:
        case Gemm():
            compute = work.flops / FLOPS + 4 * work.m * work.n / 1e15
            memory = 4 * (work.m * work.k + work.n * work.k + work.m * work.n) / 5e9
            return CALL_S + (compute**2 + memory**2) ** 0.5
        case Attention():
            return CALL_S + work.flops / 30e9
        case MemoryBound():
            return CALL_S + work.num_bytes / BYTES_PER_S


def profiled(works: list[MachineWork]) -> list[ProfiledOperator]:
    return [
        ProfiledOperator(whole=work, pieces=pieces, work=part, seconds=true_seconds(part))
        for work in works
        for pieces in PIECES
        if (part := chunk_of(work, pieces)) is not None
    ]


def test_chunks_are_equal_parts_of_the_work() -> None:
    assert chunk_of(Gemm(256, 512, 64, 4), 4) == Gemm(64, 512, 64, 4)
    part = chunk_of(ATTENTION, 4)
    assert isinstance(part, Attention)
    assert part.flops == pytest.approx(ATTENTION.flops / 4)
    assert chunk_of(MemoryBound(1000), 4) == MemoryBound(250)
    assert chunk_of(Gemm(255, 512, 64, 4), 2) is None
    assert chunk_of(MemoryBound(1), 2) is None


def test_a_made_up_machine_is_found_again() -> None:
    fit = fit_machine("made up", profiled([*GEMMS, ATTENTION, *MEMORY]))
    found = {constant.name: constant for constant in fit.table}
    assert found["gemm_flops"].value == pytest.approx(FLOPS, rel=0.05)
    assert found["attention_flops"].value == pytest.approx(30e9, rel=0.02)
    assert found["stream_bytes_per_s"].value == pytest.approx(BYTES_PER_S, rel=0.01)
    assert found["touch_s"].value == pytest.approx(CALL_S, rel=0.05)
    assert fit.mean_abs_error < 0.02


def test_held_out_operators_are_predicted_from_the_others_and_never_from_themselves() -> None:
    honest = profiled([*GEMMS, *MEMORY])
    assert max(abs(error) for error in held_out("x", honest) if error is not None) < 0.05
    slow = [
        replace(operator, seconds=3 * operator.seconds) if operator.whole == GEMMS[0] else operator
        for operator in honest
    ]
    missed = [error for o, error in zip(slow, held_out("x", slow), strict=True) if o.whole == GEMMS[0]]
    assert all(error == pytest.approx(1 / 3 - 1, abs=0.05) for error in missed)


def test_the_only_operator_of_its_kind_cannot_be_held_out() -> None:
    operators = profiled([*GEMMS, ATTENTION])
    errors = held_out("x", operators)
    for operator, error in zip(operators, errors, strict=True):
        assert (error is None) == isinstance(operator.whole, Attention)


def test_what_the_profile_says_nothing_about_is_named() -> None:
    fit = fit_machine("x", profiled(list(GEMMS)))
    assert not {c.name: c for c in fit.table}["stream_bytes_per_s"].identified


def test_the_machine_as_a_gpu_runs_operators_in_the_fitted_time() -> None:
    fit = fit_machine("x", profiled([*GEMMS, ATTENTION, *MEMORY]))
    gpu = machine_gpu(fit.constants)
    assert gpu.num_sms > 1
    assert predicted_seconds(GEMMS[0], fit.constants) == pytest.approx(true_seconds(GEMMS[0]), rel=0.05)


def test_nothing_to_fit_and_impossible_times_are_refused() -> None:
    with pytest.raises(ValueError, match="no profiled operator"):
        fit_machine("x", [])
    with pytest.raises(ValueError, match="positive and finite"):
        ProfiledOperator(whole=MEMORY[0], pieces=1, work=MEMORY[0], seconds=0.0)
