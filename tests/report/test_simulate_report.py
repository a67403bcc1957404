"""What a stage's iteration is drawn and printed as, and what the page answers of changes."""

import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.report.fitted_table import WIDTH
from lagom_overlap.report.simulate import MAX_STAGES, render_simulation, simulation_summary, stage_parts, summary
from lagom_overlap.results.simulate import SimulatedStage, SimulateResult
from lagom_overlap.sim.step_parts import CommTimes
from lagom_overlap.timeline import Timeline
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate
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
    assert "1.70 s per iteration" in text
    assert ("left out" in text) == (num_stages > MAX_STAGES)


def test_a_communicator_of_any_name_has_a_colour_of_its_own() -> None:
    parts = {part.name: part.colour for part in stage_parts(stage(0), 1.7, ("fsdp", "dp", "tp"))}
    assert parts["dp exposed"] != parts["tp exposed"]


class WhatIfs(HTMLParser):
    """The section that answers what changes would do: its sentence and, of each row, its cells and its bar."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.shapes: list[dict[str, dict[str, str | None]]] = []
        self.sentence = ""
        self._inside = self._cell = self._bold = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self._inside = self._inside or found.get("aria-labelledby") == "what-ifs"
        if not self._inside:
            return
        if tag == "tr":
            self.rows.append([])
            self.shapes.append({})
        if tag in ("td", "th"):
            self._cell = True
            self.rows[-1].append("")
        if tag in ("line", "circle", "path"):
            self.shapes[-1][f"{tag} {found.get('class') or ''}".strip()] = found
        self._bold = tag == "strong"

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "section"
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        if self._inside and self._cell:
            self.rows[-1][-1] += f" {data.strip()}"
        elif self._inside and self._bold:
            self.sentence, self._bold = data, False


SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
ASKED = {
    "job": {"name": "asked"},
    "model": {"name": "llama-2-7b", "seq_len": 2048},
    "cluster": {"preset": "h100_dgx", "nodes": 2},
    "parallel": {"tensor": 4, "data": 4, "global_batch": 8, "sequence_parallel": True, "overlap_gradients": False},
}


def test_the_page_answers_what_the_json_does(tmp_path: Path) -> None:
    result = run_simulate(SimulateRequest(job=Job(parse_job(ASKED, "job.toml")), out=tmp_path / "run"))
    answers = json.loads(result.to_json())["what_ifs"]
    page = WhatIfs((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
    _, *rows = page.rows  # the heads
    assert len(rows) == len(answers) > MAX_STAGES
    assert {answer["verdict"] for answer in answers} >= {"gain", "loss"}
    best = max(answers, key=lambda answer: answer["gain_s"])
    assert page.sentence.startswith(f"Worth trying: {best['change']}, +{100 * best['share']:.1f} % of the step")
    for row, answer in zip(rows, answers, strict=True):
        change, time, share, interval, verdict = (cell.strip() for cell in row)
        assert answer["change"] in change
        assert answer["apply"] in change
        number, unit = time.split()
        assert float(number) * SECONDS[unit] == pytest.approx(answer["gain_s"], rel=6e-3, abs=1e-9)
        step_s = result.iteration_s
        assert answer["share"] == pytest.approx(answer["gain_s"] / step_s)
        shown = [float(text) / 100 for text in re.findall(r"[-+]?[\d.]+(?= %)", f"{share} {interval}")]
        for figure, key in zip(shown, ("gain_s", "low_s", "high_s"), strict=True):
            assert figure == pytest.approx(answer[key] / step_s, abs=5.1e-4)
        assert verdict == answer["verdict"]


def test_the_bars_of_the_page_lie_where_the_intervals_do(tmp_path: Path) -> None:
    """On one axis for all: as far right of the line of no gain as the gain is; a loss off the axis is an arrow."""
    result = run_simulate(SimulateRequest(job=Job(parse_job(ASKED, "job.toml")), out=tmp_path / "run"))
    answers = json.loads(result.to_json())["what_ifs"]
    _, *shapes = WhatIfs((tmp_path / "run" / "report.html").read_text(encoding="utf-8")).shapes
    zero = float(shapes[0]["line zero"]["x1"] or "nan")
    longest = max(answer["high_s"] for answer in answers)
    per_s = (200.0 - zero) / longest
    arrows = 0
    for shape, answer in zip(shapes, answers, strict=True):
        if "path" in shape:
            assert answer["gain_s"] < -2 * longest
            arrows += 1
            continue
        places = (shape["line"]["x1"], shape["circle"]["cx"], shape["line"]["x2"])
        for place, key in zip(places, ("low_s", "gain_s", "high_s"), strict=True):
            assert float(place or "nan") == pytest.approx(max(0.0, zero + per_s * answer[key]), abs=0.2)
    assert arrows >= 1


def test_the_summary_of_a_result_answers_too() -> None:
    said = run_simulate(SimulateRequest(job=Job(parse_job(ASKED, "job.toml")))).summary().splitlines()
    assert said[2].startswith("Worth trying: ")
    assert not any("Worth trying" in line or "is predicted" in line for line in summary(result(1)).splitlines())


def test_a_page_without_answers_has_no_section() -> None:
    page = render_simulation(result(1))
    assert 'aria-labelledby="what-ifs"' not in page
    assert "Should I change something?" not in page
