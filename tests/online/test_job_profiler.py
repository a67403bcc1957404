"""The job's own profiler comes first, whatever its schedule says and whenever it is made."""

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile, schedule  # noqa: E402

from lagom_overlap.online.job_profiler import OwnProfiler  # noqa: E402

pytestmark = pytest.mark.torch
CPU = [ProfilerActivity.CPU]


@pytest.fixture
def own():
    watching = OwnProfiler()
    watching.watch()
    yield watching
    watching.stop()
    watching.unwatch()


def test_a_profiler_of_the_job_that_only_warms_up_is_seen_and_remembered(own):
    with profile(activities=CPU, schedule=schedule(wait=0, warmup=1, active=1), acc_events=True):
        assert not torch._C._autograd._profiler_enabled(), "so it is not enough to ask torch"
        assert own.why_not() == "the job has a profiler of its own"
    assert own.why_not() == "the job has a profiler of its own"


def test_ours_is_none_of_the_jobs(own):
    for _ in range(2):
        own.start(activities=CPU)
        assert own.why_not() == "another profiler runs"
        torch.ones(2) + 1
        seen = own.stop()
        assert "aten::add" in {event.name for event in seen.events()}
        assert own.why_not() == ""
    assert own.stop() is None


@pytest.mark.parametrize("warmup", [0, 1])
def test_ours_gives_way_to_a_profiler_that_the_job_makes_meanwhile(own, warmup):
    own.start(activities=CPU)
    plan = schedule(wait=0, warmup=warmup, active=1) if warmup else None
    with profile(activities=CPU, schedule=plan, acc_events=True) as of_the_job:
        for _ in range(warmup):
            of_the_job.step()
        torch.ones(2) + 1
    assert "aten::add" in {event.name for event in of_the_job.events()}
    assert own.stop() is None
    assert own.why_not() == "the job has a profiler of its own"


def test_the_older_interface_counts_as_well_unless_it_is_switched_off(own):
    with torch.autograd.profiler.profile(enabled=False):
        assert own.why_not() == ""
    own.start(activities=CPU)
    with torch.autograd.profiler.profile():
        pass
    assert own.stop() is None
    assert own.why_not() == "the job has a profiler of its own"


def test_the_constructors_are_put_back_unless_somebody_wrapped_them_again(monkeypatch):
    before = profile.__init__, torch.autograd.profiler.profile.__init__
    own = OwnProfiler()
    own.watch()
    own.watch()
    assert profile.__init__ is not before[0]

    def theirs(*words, **more):
        before[0](*words, **more)

    monkeypatch.setattr(profile, "__init__", theirs)
    own.unwatch()
    assert profile.__init__ is theirs
    monkeypatch.undo()
    profile.__init__ = before[0]
    own.watch()
    own.unwatch()
    own.unwatch()
    assert (profile.__init__, torch.autograd.profiler.profile.__init__) == before
