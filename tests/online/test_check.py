"""Saved and old settings against the job's own default: the rule, what a bad setting costs, what the checks cost."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random

import pytest
from job_of_threads import GATHERED, SCATTERED, Job
from test_online_loop import layer_s, options

from lagom_overlap.collective import CollectiveKind, CommConfig
from lagom_overlap.collective.sites import RoleCycle, SiteSetting
from lagom_overlap.online.ranks.check import Arm, Check
from lagom_overlap.online.ranks.messages import SwitchState

KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


CYCLES = (
    RoleCycle(
        description="fsdp",
        num_ranks=2,
        creation_order=0,
        calls=((CollectiveKind.ALL_GATHER, GATHERED), (CollectiveKind.REDUCE_SCATTER, SCATTERED)) * 3,
    ),
)


def slowed(job: Job, ratio: Callable[[int], float]) -> None:
    """From now on a step takes `ratio(step)` times the default's wherever anything is set."""
    for route in job.routes:
        original = route.run

        def run(route: object = route, original: Callable[[], object] = original) -> object:
            gather, scatter = (
                next(iter(c for key, c in route.table if key.kind is kind), CommConfig()) for kind in KINDS
            )
            gain = layer_s(CommConfig(), CommConfig()) / layer_s(gather, scatter)
            route.delay = lambda step: ratio(step) * gain if route.table else 1.0
            return original()

        route.run = run


def test_a_bad_saved_setting_leaves_after_three_steps_and_the_job_is_searched(found: tuple[SiteSetting, ...]) -> None:
    job = Job(options=options(check_share=0.005), started=found)
    slowed(job, lambda step: 3.4 if step < 60 else 0.9)
    records = job.run(260)
    default_s = records[0][0].duration_s
    slow = [record.duration_s > 1.5 * default_s for record in records[0]]
    states = [state for state, _ in job.plans[0]]
    first = states.index("search")
    assert sum(slow[:first]) == 3, "a probation of three steps, no more"
    assert states[:first] == ["record"] * 5 + ["check"] * 3 + ["record"] * 5
    assert states[-1] == SwitchState.WATCH
    assert job.plans[0] == job.plans[1]
    assert not job.meeting.mismatches


def test_a_saved_setting_that_is_a_little_slower_leaves_once_the_rounds_cannot_be_won(
    found: tuple[SiteSetting, ...],
) -> None:
    job = Job(options=options(check_share=0.005, num_pairs=7, max_steps=0), started=found)
    slowed(job, lambda step: 1.6)
    job.run(80)
    states = [state for state, _ in job.plans[0]]
    # Times that repeat to the last bit are decided after three rounds: 3 steps, then 3 x 2 windows of 5.
    assert states.count("check") == 3 + 30
    assert not job.members[0].settings
    assert job.members[0].adopted is None
    assert not job.meeting.mismatches


@pytest.mark.parametrize("watch_steps", [0, 8])
def test_a_good_saved_setting_stays_and_is_then_one_of_this_job(
    found: tuple[SiteSetting, ...], watch_steps: int
) -> None:
    job = Job(options=options(check_share=0.005, num_pairs=7, watch_steps=watch_steps), started=found)
    job.run(120)
    states = [state for state, _ in job.plans[0]]
    assert list(dict.fromkeys(states)) == ["record", "check", "watch" if watch_steps else "done"]
    assert states.count("check") == 3 + 3 * 2 * 5
    assert job.members[1].settings == found
    assert job.members[1].adopted is not None
    assert "faster here: they are proven faster" in job.members[1].plan.reason
    assert not job.meeting.mismatches


def num_checked_too_much(states: list[str], share: float) -> list[int]:
    """Steps at which more had gone into checks than their share of the settled steps before."""
    wrong, num_checked, num_settled = [], 0, 0
    for step, state in enumerate(states):
        num_checked += state == "check"
        if state == "check" and num_checked > share * num_settled:
            wrong.append(step)
        num_settled += state == "watch"
    return wrong


def test_settings_that_turn_bad_leave_on_all_ranks_and_checks_cost_no_more_than_their_share(
    found: tuple[SiteSetting, ...],
) -> None:
    share = 0.1
    job = Job(options=options(check_share=share, max_rearms=0, drift_ratio=1e6, timeout_s=20.0), started=found)
    slowed(job, lambda step: 0.9 if step < 1500 else 1.9)
    job.run(1800)
    states = [state for state, _ in job.plans[0]]
    begun = states.index("watch")
    assert num_checked_too_much(states[begun:], share) == []
    before = states[begun:1500]
    # Eight rounds of ten steps are saved up for, then each check is one round that is won, one more may be under way.
    num_rounds = (share * before.count("watch") - 80) / 10
    assert 0 < num_rounds - 1 <= before.count("check") / 10 <= num_rounds + 1
    left = max(number for number, state in enumerate(states) if state == "check")
    # Found by the next round that was due, then three rounds.
    assert 1500 < left < 1500 + 10 / share + 60
    assert states[-1] == SwitchState.DONE
    assert not job.members[0].settings
    assert "it has changed since (the settings are slower than the default here" in job.members[1].plan.reason
    assert [member.adopted for member in job.members] == [None, None], "the check was a verdict, too"
    assert job.plans[0] == job.plans[1]
    assert not job.meeting.mismatches


def test_checks_that_decide_nothing_never_take_more_than_their_share(found: tuple[SiteSetting, ...]) -> None:
    """Settings as fast as the default, in noise: every second check goes on to its last round."""
    share, random = 0.2, Random(1)
    noise = [random.lognormvariate(0.0, 0.03) for _ in range(3000)]
    job = Job(options=options(check_share=share, max_rearms=0, drift_ratio=1e6, timeout_s=20.0))
    job.run(220)
    slowed(job, noise.__getitem__)
    job.run(2500)
    states = [state for state, _ in job.plans[0]]
    settled = states[states.index("watch") :]
    assert set(settled) <= {"watch", "check"}
    assert 0.9 * share * settled.count("watch") - 80 < settled.count("check")
    assert num_checked_too_much(settled, share) == []
    assert job.plans[0] == job.plans[1]
    assert not job.meeting.mismatches


def test_a_drift_after_the_last_search_has_the_settings_checked(found: tuple[SiteSetting, ...]) -> None:
    chosen = options(check_share=0.005, max_rearms=0, drift_ratio=1.08, drift_steps=10, timeout_s=20.0)
    job = Job(options=chosen, started=found)
    slowed(job, lambda step: 0.9 if step < 2400 else 1.9)
    job.run(2900)
    states = [state for state, _ in job.plans[0]]
    assert states[-1] == SwitchState.DONE
    assert not job.members[0].settings
    assert not job.meeting.mismatches


def test_where_nothing_can_be_measured_saved_settings_are_judged_by_the_clock(found: tuple[SiteSetting, ...]) -> None:
    for ratio, is_kept in ((0.9, True), (1.7, False)):
        job = Job(options=options(check_share=0.005), started=found, cycles=CYCLES)
        job.start()
        slowed(job, lambda step, ratio=ratio: ratio)
        for member in job.members:
            member._why_not = lambda: "the job has a profiler of its own"
        job.run(5 * 22 + 40)
        assert (job.members[1].settings == found) is is_kept
        assert not job.meeting.mismatches


def test_a_window_of_a_later_check_that_cannot_be_measured_leaves_all_as_it_was(
    found: tuple[SiteSetting, ...],
) -> None:
    job = Job(options=options(check_share=0.2), started=found)
    job.run(220)
    for member in job.members:
        member._why_not = lambda: "another profiler runs"
    job.run(600)
    states = [state for state, _ in job.plans[0][220:]]
    assert "check" in states
    assert num_checked_too_much([state for state, _ in job.plans[0][40:]], 0.2) == []
    assert set(states) == {"watch", "check"}
    assert job.members[0].settings == found


def ends(is_start: bool, ratios: Iterable[float], num_pairs: int = 25) -> tuple[bool, int]:
    """How a check ends whose rounds have these ratios of default over tuned, and after how many windows."""
    check = Check(num_pairs=num_pairs, seed="0", max_slowdown=100.0, default_s=1.0, is_start=is_start)
    num, left = 0, iter(ratios)
    ratio, seen = next(left), set[Arm]()
    while not check.is_over:
        arm, was_probation = check.next_arm, check.is_probation
        check.report(1.0 if arm is Arm.DEFAULT else 1.0 / ratio)
        num += 1
        if was_probation:
            continue
        seen.add(arm)
        if seen == {*Arm} and not check.is_over:
            ratio, seen = next(left), set()
    return check.is_kept, num


def drawn(seed: int, middle: float) -> Iterator[float]:
    random = Random(seed)
    while True:
        yield random.lognormvariate(middle, 0.03)


@pytest.mark.parametrize(("num", "most"), [(12, 0), pytest.param(100, 4, marks=pytest.mark.long)])
def test_saved_settings_that_are_not_faster_stay_once_in_a_hundred_at_most(num: int, most: int) -> None:
    assert sum(ends(True, drawn(seed, 0.0))[0] for seed in range(num)) <= most


@pytest.mark.parametrize(("num", "most"), [(12, 0), pytest.param(100, 4, marks=pytest.mark.long)])
def test_settings_that_are_not_slower_leave_once_in_a_hundred_at_most(num: int, most: int) -> None:
    assert sum(not ends(False, drawn(seed, 0.0))[0] for seed in range(num)) <= most


def test_settings_far_from_the_default_are_told_from_it_in_few_rounds() -> None:
    for seed in range(10):
        assert ends(True, drawn(seed, 0.2))[0]
        assert not ends(True, drawn(seed, -0.2))[0]
        is_kept, num = ends(False, drawn(seed, -0.2))
        assert (is_kept, num <= 2 + 2 * 9) == (False, True)


def test_a_later_check_that_is_won_at_once_is_one_round() -> None:
    assert ends(False, [1.02]) == (True, 2)
    assert ends(False, [0.98, 1.1, 1.1, 1.1]) == (True, 2 + 2 * 3)
    assert ends(True, [0.9, 0.9, 0.9]) == (False, 1 + 2 * 3)


def test_a_check_too_short_for_a_decision_leaves_all_as_it_is() -> None:
    assert ends(True, drawn(1, 0.2), num_pairs=5)[0] is False
    assert ends(False, drawn(1, -0.2), num_pairs=5)[0] is True


def proving(found: tuple[SiteSetting, ...], **changes: object) -> Job:
    """A job that only judges settings: `lagom run --prove`."""
    return Job(
        options=options(searches=False, watch_steps=0, check_share=0.005, num_pairs=25, **changes), started=found
    )


def test_a_proof_of_faster_settings_leaves_them_set_and_searches_nothing(found: tuple[SiteSetting, ...]) -> None:
    job = proving(found)
    lefts: list[int] = []
    job.run(90, work=lambda rank, step: lefts.append(job.leader.num_steps_left) if rank == 0 else None)
    assert {state for state, _ in job.plans[0]} == {"record", "check", "done"}
    assert job.members[0].settings == found
    check = job.leader.start_check
    assert check.is_kept
    judgement = check.judgement
    assert judgement.decision == "faster"
    default_s, tuned_s = (times[0] for times in check.times_s)
    assert judgement.ratio == pytest.approx(default_s / tuned_s)
    assert judgement.noise == 0.0, "the default ran against itself"
    in_check = [left for left, (state, _) in zip(lefts, job.plans[0], strict=False) if state == "check"]
    assert in_check == sorted(in_check, reverse=True)
    assert in_check[0] <= 5 * (1 + 6 + 50)
    assert lefts[-1] == 0


def test_a_proof_that_is_lost_ends_untouched_and_is_not_followed_by_a_search(found: tuple[SiteSetting, ...]) -> None:
    job = proving(found)
    slowed(job, lambda step: 1.3)
    job.run(120)
    assert {state for state, _ in job.plans[0]} == {"record", "check", "done"}
    assert job.members[0].settings == ()
    assert job.leader.start_check.judgement.decision == "slower"
    assert "searching" not in job.members[0].plan.reason


def test_settings_of_another_job_are_not_proven_and_nothing_else_is_tried(found: tuple[SiteSetting, ...]) -> None:
    setting = found[0]
    other = replace(setting, site=replace(setting.site, call=replace(setting.site.call, num_bytes=3 << 20)))
    job = proving((other, *found[1:]))
    job.run(20)
    assert {state for state, _ in job.plans[0]} == {"record", "done"}
    assert f"1 of {len(found)} call sites of the settings" in job.members[0].plan.reason
    assert job.leader.start_check is None


def proof_check(num_pairs: int = 25) -> Check:
    return Check(num_pairs=num_pairs, seed="0", max_slowdown=2.0, default_s=1.0, is_start=True, num_same=3)


def test_one_slow_window_decides_no_proof_and_two_running_do() -> None:
    check = proof_check()
    check.report(5.0)  # the first window of all, in a burst of another job's work
    assert not check.is_over
    for _ in range(6):
        check.report(1.0)
    for _ in range(60):
        if not check.is_over:
            check.report(0.8 if check.next_arm is Arm.TUNED else 1.0)
    assert check.is_kept, check.words
    check = proof_check()
    for time_s in (5.0, *[1.0] * 6):
        check.report(time_s)
    while not check.is_over:
        check.report(4.0 if check.next_arm is Arm.TUNED else 1.0)
    assert (check.is_kept, check.is_too_slow, len(check.times_s[1])) == (False, True, 0)
    assert check.words == "steps take 4.00 times as long, in two windows running"
