"""Jobs whose calls have other sizes in every step: told apart by classes, which all ranks take at one step."""

import pytest
from job_of_threads import Job, Meeting, SimulatedRoute, comm_s

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.messages import SwitchState
from lagom_overlap.online.routes.base import CallRecord, StepKeys, StepRecord, by_class

MIB = 1 << 20
AG, RS = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER


class VaryingRoute(SimulatedRoute):
    """Two calls a step, one after the other, whose sizes `size_of` gives; rows are looked up as routes do."""

    size_of = staticmethod(lambda step, kind: (9 + 3 * step % 7) * MIB)
    """From 9 to 15 MiB: within 8 to 16. Every seven steps are alike, so that windows of a verdict are."""

    def run(self) -> StepRecord:
        self.step += 1
        keys, now, calls = StepKeys(self.communicator), 0.0, []
        for kind in (AG, RS):
            size = self.size_of(self.step, kind)
            key = keys.next_key(kind, size)
            config = self.call(key)
            joined = now + self.alone_s
            ended = now + comm_s(kind, size, config)
            resumed = max(joined, ended)
            calls.append(
                CallRecord(key=key, issued_s=now, begun_s=now, ended_s=ended, joined_s=joined, resumed_s=resumed)
            )
            now = resumed
        self.record = StepRecord(duration_s=now, calls=tuple(calls))
        self.meeting.step_done()
        return self.record


def varying_job(num_ranks: int = 2, **what: object) -> Job:
    options = OnlineOptions(timeout_s=5.0, num_pairs=6, window_steps=7, max_steps=2000, check_share=0.0)
    job = Job(num_ranks=num_ranks, options=options, **what)
    job.meeting = Meeting(num_ranks)
    job.routes = [VaryingRoute(rank, num_ranks, job.meeting) for rank in range(num_ranks)]
    return job


def states(job: Job) -> list[str]:
    return list(dict.fromkeys(state for state, _ in job.plans[0]))


def test_sizes_that_vary_within_an_octave_are_searched_by_classes_and_adopted() -> None:
    job = varying_job()
    job.run(500)
    assert job.meeting.mismatches == []
    member = job.members[0]
    assert member.plan.state in (SwitchState.WATCH, SwitchState.DONE), member.plan.reason
    assert {setting.site.call.num_bytes for setting in member.settings} == {8 * MIB}
    assert member.size_octaves == 1
    assert "search" in states(job)
    assert "frozen" not in states(job)
    settled = [config for _, config in list(job.meeting.seen.values())[-40:]]
    assert all(not config.is_untouched for config in settled)  # whatever size a call has


def test_saved_classes_start_the_next_job() -> None:
    first = varying_job()
    first.run(500)
    assert first.members[0].settings
    second = varying_job(started=first.members[0].settings, size_octaves=first.members[0].size_octaves)
    second.run(30)
    assert second.meeting.mismatches == []
    assert second.members[1].plan.state is SwitchState.WATCH
    assert second.members[1].settings == first.members[0].settings


def test_wider_classes_are_taken_where_an_octave_is_not_enough() -> None:
    job = varying_job()
    for route in job.routes:
        route.size_of = staticmethod(
            lambda step, kind: (5 + 3 * step % 7 + 3 * (step % 7 == 6)) * MIB
        )  # 5 to 15 MiB: within 4 to 16
    job.run(300)
    assert job.meeting.mismatches == []
    assert job.members[0].size_octaves == 2
    assert {setting.site.call.num_bytes for setting in job.members[0].settings} <= {4 * MIB}


@pytest.mark.parametrize("every", [13, 20])
def test_a_step_now_and_then_that_is_not_like_the_others_leaves_sizes_to_themselves(every: int) -> None:
    job = varying_job()
    for route in job.routes:
        route.size_of = staticmethod(lambda step, kind: (12 if step % every == 0 else 10) * MIB)
    job.run(400)
    assert {member.size_octaves for member in job.members} == {0}
    assert all(config.is_untouched or key.num_bytes == 10 * MIB for key, config in job.meeting.seen.values())


def test_ranks_of_a_communicator_keep_one_setting_when_a_rank_falls_out() -> None:
    """What is set is by class on all ranks or on none, also when the tuning ends in the middle."""
    job = varying_job(num_ranks=3)
    job.run(120, work=lambda rank, step: job.members[rank].stop("enough") if (rank, step) == (2, 75) else None)
    assert job.meeting.mismatches == []
    assert all(member.plan.state is SwitchState.OFF for member in job.members)


def test_a_key_of_a_class_counts_all_of_its_sizes() -> None:
    communicator = VaryingRoute(0, 2).communicator
    named = StepKeys(communicator)
    own = [named.next_key(AG, size * MIB) for size in (9, 15, 16, 9)]
    assert [(key.num_bytes // MIB, key.occurrence) for key in own] == [(9, 0), (15, 0), (16, 0), (9, 1)]
    record = StepRecord(duration_s=1, calls=tuple(CallRecord(key=k, issued_s=0, begun_s=0, ended_s=0) for k in own))
    by_octave = [call.key for call in by_class(record, 1).calls]
    assert [(key.num_bytes // MIB, key.occurrence) for key in by_octave] == [(8, 0), (8, 1), (16, 0), (8, 2)]
