"""`lagom compare` on a recording: ratios within a visit, nothing won by noise, every figure by hand."""

import json
from collections.abc import Sequence
from math import exp, log, pi, sqrt
from pathlib import Path

import pytest
from stub_backend import UNTOUCHED_G, UNTOUCHED_H, Setting, StubBackend, assignment_of, job

from lagom_overlap.cli.main import main
from lagom_overlap.errors import BackendError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.results.compare import CompareRow
from lagom_overlap.tuners.bundle import header_line
from lagom_overlap.tuners.journal import Entry, Step, StepKind, entry_to_json
from lagom_overlap.tuners.problem import Failure, Measurement
from lagom_overlap.verbs.compare import REPLAYED, CompareRequest, run_compare

G_MIN, H_MIN = (2, 2), (2,)
"""Where `fixed_min` ends."""
Line = tuple[Setting, Setting, float | None, int | None]
"""Settings of g and h, the makespan of both (None: failed), the round of the verdict if it was one."""


def bundle(folder: Path, *lines: Line) -> Path:
    spec = job()
    groups = Job(spec).groups
    problems = tuple(StubBackend({}).problem(group) for group in groups)
    text = [header_line(Job(spec).request_for(groups).job_fingerprint, "gloo", problems, notes=("as it was",))]
    for number, (of_g, of_h, time_s, round_number) in enumerate(lines):
        outcomes = {
            name: Failure("cannot run")
            if time_s is None
            else Measurement(makespan_s=time_s, comp_s=time_s / 2, comm_s=(time_s / 4,) * num)
            for name, num in (("g", 2), ("h", 1))
        }
        kind = StepKind.SEARCH if round_number is None else StepKind.VERDICT
        arm = None if round_number is None else str(of_g)
        assignments = {"g": assignment_of(of_g), "h": assignment_of(of_h)}
        step = Step(number=number, kind=kind, assignments=assignments, arm=arm, round=round_number)
        text.append(entry_to_json(Entry(step=step, outcomes=outcomes), problems))
    path = folder / "measurements.jsonl"
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def passes(default: Sequence[float], found: Sequence[float]) -> list[Line]:
    """A surface of two settings, pass by pass."""
    return [
        line
        for first, second in zip(default, found, strict=True)
        for line in ((G_MIN, H_MIN, second, None), (UNTOUCHED_G, UNTOUCHED_H, first, None))
    ]


def rows(path: Path, *tuners: str) -> list[CompareRow]:
    request = CompareRequest(job=Job(job()), tuners=tuners or ("default", "fixed_min"), backend="recorded", bundle=path)
    return run_compare(request).rows


def test_ratios_are_taken_within_a_pass_whatever_the_machine_did_between_them(tmp_path: Path) -> None:
    # The machine was four times slower in the second pass, and fixed_min 1.25 times faster in both.
    default, found = rows(bundle(tmp_path, *passes((10, 40), (8, 32))))
    assert default.speedup_over_default == 1
    assert default.speedup_interval == (1, 1)
    assert default.makespan_s == 5 * 25
    assert found.speedup_over_default == pytest.approx(1.25)
    assert found.makespan_s == 5 * 20
    assert found.regret_over_best == 0
    assert default.regret_over_best == pytest.approx(0.25)


def test_the_interval_rests_on_how_far_all_repeats_scatter(tmp_path: Path) -> None:
    # Each of two settings in each of two groups: ln 4 apart, so a variance of 2 (ln 2)^2 with one degree of freedom.
    _, found = rows(bundle(tmp_path, *passes((10, 40), (8, 32))))
    sigma = sqrt(2) * log(2)
    reach = exp(1.96 * sigma * sqrt(2 / 2))
    assert found.speedup_interval == pytest.approx((1.25 / reach, 1.25 * reach))
    _, exact = rows(bundle(tmp_path, *passes((10, 10, 10), (8, 8, 8))))
    assert exact.speedup_interval == pytest.approx((1.25, 1.25))


def test_more_passes_make_the_interval_narrower(tmp_path: Path) -> None:
    few = rows(bundle(tmp_path, *passes((10, 12) * 2, (10.1, 12) * 2)), "fixed_min")[0].speedup_interval
    many = rows(bundle(tmp_path, *passes((10, 12) * 8, (10.1, 12) * 8)), "fixed_min")[0].speedup_interval
    assert few is not None
    assert many is not None
    assert many[1] / many[0] < few[1] / few[0]


def test_the_median_of_more_than_two_is_surer_by_less_than_their_mean(tmp_path: Path) -> None:
    _, found = rows(bundle(tmp_path, *passes((10, 20, 10, 20), (8, 16, 8, 16))))
    sigma = sqrt(4 * (log(2) / 2) ** 2 / 3)
    reach = exp(1.96 * sigma * sqrt(pi / 4))
    assert found.speedup_interval == pytest.approx((1.25 / reach, 1.25 * reach))


def test_of_one_pass_there_is_no_interval(tmp_path: Path) -> None:
    _, found = rows(bundle(tmp_path, *passes((10,), (8,))))
    assert found.speedup_over_default == pytest.approx(1.25)
    assert found.speedup_interval is None


def test_two_tuners_with_one_result_have_one_figure(tmp_path: Path) -> None:
    found = rows(bundle(tmp_path, *passes((10, 20, 30), (9, 30, 20))), "fixed_min", "exhaustive")
    default = next(row for row in rows(tmp_path / "measurements.jsonl") if row.tuner == "default")
    assert found[0].makespan_s == 5 * 20
    assert {row.speedup_over_default for row in found} <= {found[0].speedup_over_default, 1.0}
    assert default.speedup_over_default == 1.0


def test_rounds_of_a_recorded_verdict_are_paired_by_their_number(tmp_path: Path) -> None:
    lines: list[Line] = [
        (UNTOUCHED_G, UNTOUCHED_H, 1.0, None),
        (G_MIN, H_MIN, 4.0, None),
        (G_MIN, H_MIN, 8.0, None),
        (G_MIN, H_MIN, 10.0, 1),
        (UNTOUCHED_G, UNTOUCHED_H, 50.0, 0),
        (G_MIN, H_MIN, 25.0, 0),
        (UNTOUCHED_G, UNTOUCHED_H, 20.0, 1),
        (UNTOUCHED_G, UNTOUCHED_H, 24.0, None),
    ]
    (found,) = rows(bundle(tmp_path, *lines), "fixed_min")
    # Pairs: first visits 1 over 4, second ones 24 over 8, rounds 50 over 25 and 20 over 10.
    assert found.speedup_over_default == 2.0
    assert found.makespan_s == 5 * 9


def test_failures_among_the_values_are_left_out(tmp_path: Path) -> None:
    lines = [*passes((10, 10), (8, 8)), (G_MIN, H_MIN, None, None)]
    assert rows(bundle(tmp_path, *lines), "fixed_min")[0].speedup_over_default == pytest.approx(1.25)


def test_a_default_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    path = bundle(tmp_path, (G_MIN, H_MIN, 1.0, None))
    with pytest.raises(BackendError, match="what 'default' ended with is not in the recording"):
        rows(path, "fixed_min")


def test_the_notes_say_that_nothing_was_measured(tmp_path: Path) -> None:
    path = bundle(tmp_path, *passes((10, 10), (8, 8)))
    notes = run_compare(CompareRequest(job=Job(job()), tuners=("default",), backend="recorded", bundle=path)).notes
    assert notes == ("Replayed from a recording: nothing was measured in this run.", "as it was", REPLAYED)


SURFACE = Path(__file__).parents[2] / "benchmarks/results/surfaces/gloo_tensor"
EXAMPLE = Path(__file__).parents[2] / "examples/overlaps/gloo_tensor.toml"


def test_the_surface_that_the_documents_name_can_be_compared_and_warmed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["compare", str(EXAMPLE), "--backend", "recorded", "--bundle", str(SURFACE), "--json"]
    given += ["--tuners", "default,lagom,ours", "--warm-start", str(SURFACE)]
    assert main([*given, "--out", str(tmp_path / "out")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "out" / "compare.json").read_text())
    by_name = {row["tuner"]: row for row in result["rows"]}
    assert by_name["default"]["speedup_over_default"] == 1
    low, high = by_name["lagom"]["speedup_interval"]
    assert low < by_name["lagom"]["speedup_over_default"] < high
    assert any(note.startswith("The search of ours began with 52 measurements") for note in result["notes"])
