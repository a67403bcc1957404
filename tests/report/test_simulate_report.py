"""What a stage's iteration is drawn and printed as."""

from io import StringIO

import pytest
from rich.console import Console

from lagom_overlap.report.simulate.terminal import MAX_STAGES, WIDTH, simulation_summary
from lagom_overlap.report.simulate.words import stage_parts
from lagom_overlap.results.simulate import SimulatedStage, SimulateResult
from lagom_overlap.sim.step_parts import CommTimes
from lagom_overlap.timeline import Timeline
from lagom_overlap.workload.parallel import StageMemory

MEMORY = StageMemory(parameter_bytes=2, gradient_bytes=4, optimizer_bytes=12, activation_bytes=10**9)
COMMS = {
    "dp": CommTimes(total_s=0.3, exposed_s=0.1, stretched_s=0.05),
    "tp": CommTimes(total_s=0.2, exposed_s=0.2, stretched_s=0.0),
}


def stage(rank: int) -> SimulatedStage:
    return SimulatedStage(
        step_s=1.0,
        stage=rank,
        busy_s=1.3,
        bubble_s=0.2,
        compute_s=1.0,
        launch_s=0.0,
        gradients_s=0.1,
        optimizer_s=0.05,
        communicators=COMMS,
        memory=MEMORY,
    )


def result(num_stages: int) -> SimulateResult:
    return SimulateResult(
        tool="lagom simulate",
        version="0",
        job="[red]job",
        model="gpt",
        cluster="c",
        num_gpus=8,
        num_micro_batches=4,
        iteration_s=1.7,
        tokens_per_s=1000.0,
        model_flops=1e15,
        mfu=0.5,
        peak_flops_per_gpu=1e14,
        memory_bytes=MEMORY.total_bytes,
        memory_limit_bytes=80 * 10**9,
        bubble_s=0.2,
        communicators=COMMS,
        stages=tuple(stage(rank) for rank in range(num_stages)),
        notes=("[bold]note",),
        files=(),
        simulated=Timeline(()),
    )


def test_the_parts_of_a_stage_add_up_to_the_iteration() -> None:
    parts = stage_parts(stage(0), 1.7, tuple(COMMS))
    assert sum(part.seconds for part in parts) == pytest.approx(1.7)
    assert [part.name for part in parts] == [
        "compute", "dp exposed", "tp exposed", "stretched", "bubble", "optimizer", "waits at the end",
    ]  # fmt: skip


@pytest.mark.parametrize("num_stages", [1, MAX_STAGES, MAX_STAGES + 27])
def test_the_summary_fits_a_terminal_and_shows_names_as_they_are(num_stages: int) -> None:
    console = Console(width=WIDTH, file=StringIO())
    console.print(simulation_summary(result(num_stages)))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # the StringIO above
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert "[bold]note" in text
    assert "1.7 s per iteration" in text
    assert ("left out" in text) == (num_stages > MAX_STAGES)


def test_a_communicator_of_any_name_has_a_colour_of_its_own() -> None:
    parts = {part.name: part.colour for part in stage_parts(stage(0), 1.7, ("fsdp", "dp", "tp"))}
    assert parts["dp exposed"] != parts["tp exposed"]
