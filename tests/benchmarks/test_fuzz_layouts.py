"""The fuzzer of job files: some of its jobs keep every law, and a law that is broken is found."""

from dataclasses import replace

import pytest

import fuzz_layouts
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", [2, 3, 5, 6, 8, 18])
def test_drawn_jobs_are_refused_in_a_line_or_keep_every_law(seed: int) -> None:
    how, finds = fuzz_layouts.finds_of(fuzz_layouts.drawn(seed), plans=False)
    assert how in ("refused", "predicted")
    assert finds == []


def test_the_same_seed_draws_the_same_job() -> None:
    assert fuzz_layouts.drawn(7) == fuzz_layouts.drawn(7)
    assert fuzz_layouts.drawn(7) != fuzz_layouts.drawn(8)


def test_broken_laws_are_found() -> None:
    raw = fuzz_layouts.drawn(18)
    spec = parse_job(raw, "job.toml")
    result = run_simulate(SimulateRequest(job=Job(spec)))
    assert list(fuzz_layouts.sane(replace(result, mfu=1.5, simulated=result.timeline)))
    first = replace(result.stages[0], gradients_s=-1.0)
    assert list(fuzz_layouts.sane(replace(result, stages=(first, *result.stages[1:]), simulated=result.timeline)))
    if result.what_ifs:
        wrong = replace(result.what_ifs[0], gain_s=1.0, setting="[parallel] overlap_gradients = true")
        assert list(fuzz_layouts.answers_hold(raw, replace(result, what_ifs=(wrong,), simulated=result.timeline)))
    job = Job(spec).step
    assert job is not None
    assert list(fuzz_layouts.grows_with_tokens(job)) == []
