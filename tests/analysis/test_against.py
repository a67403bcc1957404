"""Two runs compared: analysis/against.py and what job, report and command line make of it."""

import json

import pytest
from gpu_traces import gpu_trace
from kineto_traces import KinetoFile
from rich.console import Console

from lagom_overlap.analysis.against import against
from lagom_overlap.analysis.findings import Findings, analyse
from lagom_overlap.cli.main import main
from lagom_overlap.report.analyze.page import render_analysis
from lagom_overlap.report.analyze.terminal import WIDTH, analysis_summary
from lagom_overlap.trace.gpu_trace import EventRole
from lagom_overlap.verbs.analyze import AnalyzeRequest, run_analyze


def job(step_ns: int, *, channels: int = 16, num_steps: int = 6, wobble: int = 0, op: str = "all_reduce") -> Findings:
    """Steps of one kernel and, at its end, one exposed collective that fills the step."""
    rows, steps, launches = [], [], []
    at = 0
    for n in range(num_steps):
        length = step_ns + (wobble if n % 2 else -wobble)
        rows += [(EventRole.COMPUTE, at, at + 400), (EventRole.COMM, at + 400, at + length)]
        launches += [at, at]
        steps.append((n, at, at + length))
        at += length
    calls = [{"num_channels": channels, "op": op} for _ in range(num_steps)]
    return analyse([gpu_trace(rows, steps=steps, launches=launches, calls=calls)])


def test_a_step_s_parts_are_compared_per_step_whatever_the_number_of_steps():
    found = against(job(800, num_steps=7), job(1000, num_steps=5))
    assert (found.before.step_s, found.after.step_s) == (1000e-9, 800e-9)
    assert (found.before.exposed_comm_s, found.after.exposed_comm_s) == (600e-9, 400e-9)
    assert found.step_ratio == pytest.approx(0.8)
    (change,) = found.collectives
    assert (change.before.total_s, change.after.total_s, change.size_s) == pytest.approx((600e-9, 400e-9, 200e-9))
    assert change.before.count == change.after.count == 1


def test_one_collective_with_other_channels_is_the_same_collective():
    (change,) = against(job(800, channels=4), job(1000, channels=16)).collectives
    assert (change.kind, change.communicator, change.bytes, change.num_ranks) == ("all_reduce", "dp", 1 << 20, 8)
    assert (change.before.channels, change.after.channels) == ((16,), (4,))


def test_what_only_one_run_has_counts_nothing_in_the_other():
    found = against(job(800, op="all_gather"), job(800, op="all_reduce"))
    counts = {change.kind: (change.before.count, change.after.count) for change in found.kinds}
    assert counts == {"all_reduce": (1, 0), "all_gather": (0, 1)}
    (communicator,) = found.communicators
    assert (communicator.before.total_s, communicator.after.total_s) == (400e-9, 400e-9)


def test_a_change_within_the_scatter_of_steps_is_not_proven_and_one_beyond_is():
    assert not against(job(1010, wobble=200), job(1000, wobble=200)).is_proven
    found = against(job(1300, wobble=20), job(1000, wobble=20))
    assert found.is_proven
    assert found.step_ratio_low < 1.3 < found.step_ratio_high


def test_runs_on_other_gpus_or_ranks_or_without_steps_are_said_to_differ_after_against_before():
    def runs(num_ranks: int, gpu: str, num_steps: int) -> Findings:
        steps = [(n, 1000 * n, 1000 * n + 1000) for n in range(num_steps)]
        rows = [(EventRole.COMPUTE, 0, 400), (EventRole.COMM, 400, 900)]
        return analyse([gpu_trace(rows, steps=steps, rank=rank, gpu_name=gpu) for rank in range(num_ranks)])

    assert against(after=runs(2, "H100", 1), before=runs(3, "A100", 1)).warnings == (
        "the two runs ran on different GPUs: A100 against H100",
        "2 ranks against 3: the averages are over different ranks",
    )
    assert against(after=runs(2, "H100", 1), before=runs(2, "H100", 1)).warnings == ()
    for after, before in ((0, 1), (1, 0)):
        (said,) = against(after=runs(1, "H100", after), before=runs(1, "H100", before)).warnings
        assert said.startswith("a trace has no profiler steps")


def test_a_run_against_itself_did_not_change():
    found = against(job(1000, wobble=50), job(1000, wobble=50))
    assert found.step_ratio == 1
    assert not found.is_proven
    assert all(change.size_s == 0 for change in found.collectives)


def test_few_steps_give_no_interval():
    found = against(job(1000, num_steps=3), job(800, num_steps=6))
    assert (found.step_ratio_low, found.step_ratio_high) == (None, None)


def trace(path, all_reduce_us: float, channels: int):
    file = KinetoFile()
    for step in range(6):
        at = step * 1000.0
        file.step(step, at, 1000.0)
        file.kernel("gemm", at + 10, 500)
        file.nccl("AllReduce", at + 510, all_reduce_us + step, op="allreduce", nelems=1 << 20, grid=[channels, 1, 1])
    return file.write(path)


def test_the_verb_tells_what_changed_in_json_on_the_page_and_in_the_terminal(tmp_path, capsys):
    a, b = trace(tmp_path / "a.json", 200, 4), trace(tmp_path / "b.json", 300, 16)
    assert main(["analyze", str(a), "--against", str(b), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["against"]
    assert found["files"] == ["b.json"]
    (row,) = found["kinds"]
    assert (row["kind"], row["bytes"]) == ("all_reduce", None)
    assert row["after"]["total_s"] - row["before"]["total_s"] == pytest.approx(-100e-6)
    assert (row["before"]["channels"], row["after"]["channels"]) == ([16], [4])
    report = run_analyze(AnalyzeRequest(traces=(a,), against=(b,)))
    assert "Against the other run" in render_analysis(report)
    console = Console(width=WIDTH, record=True, file=(tmp_path / "x").open("w"))
    console.print(analysis_summary(report))
    console.file.close()
    text = console.export_text()
    assert "16→4" in text
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert len(text.splitlines()) < 50


def test_without_another_run_nothing_is_compared(tmp_path):
    result = run_analyze(AnalyzeRequest(traces=(trace(tmp_path / "a.json", 200, 4),)))
    assert result.against is None
    assert "Against the other run" not in render_analysis(result)
