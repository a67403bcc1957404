"""Both sides switched together: on stand-ins, and through the whole loop on threads and formulas."""

import logging
from pathlib import Path

import job_of_threads
import pytest
from job_of_threads import GATHERED, Job, SimulatedRoute

from lagom_overlap.collective import (
    UNTOUCHED_LAUNCH,
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigTable,
    LaunchConfig,
    LaunchOrder,
    LaunchScope,
    LaunchSpace,
    StreamPriority,
)
from lagom_overlap.collective.sites import CallType, Site, SiteSetting, table_of
from lagom_overlap.errors import BackendError, JobError
from lagom_overlap.export.saved import SavedSettings, read_saved, write_saved
from lagom_overlap.online.journal import JournalFile
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.messages import SwitchState, WindowPlan, decode, encode
from lagom_overlap.online.routes.compute import BothSidesRoute, NoComputeRoute
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.both_sides import BothSides
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.study import Study

RANKS = CommunicatorId(description="fsdp", ranks=(0, 1))
KEYS = [
    ConfigKey(communicator=RANKS, kind=CollectiveKind.ALL_GATHER, num_bytes=GATHERED, occurrence=n) for n in range(2)
]
EIGHT = LaunchConfig(sm_carveout=8)


class FakeCompute:
    """Implements `ComputeRoute` and keeps what it was told; carve-outs below 12."""

    description = "a fake"

    def __init__(self) -> None:
        self.applied: list[LaunchConfig] = []
        self.num_closed = 0
        self.breaks = False

    @property
    def carved(self) -> int:
        return (self.applied[-1].sm_carveout or 0) if self.applied else 0

    def check(self, launch: LaunchConfig) -> None:
        if (launch.sm_carveout or 0) >= 12:
            raise BackendError("no such number of SMs")

    def apply(self, launch: LaunchConfig) -> None:
        if self.breaks:
            raise RuntimeError("driver gone")
        self.applied.append(launch)

    def close(self) -> None:
        self.num_closed += 1
        self.applied.append(UNTOUCHED_LAUNCH)


class Runnable(BothSidesRoute):
    """Both sides of a simulated job: a step takes 0.7 of its time where the carve-out holds the channels."""

    def __init__(self, route: SimulatedRoute, compute: FakeCompute) -> None:
        super().__init__(route, compute)
        self.route, self.compute = route, compute
        route.delay = lambda _: 0.7 if self.holds() else 1.0

    def holds(self) -> bool:
        return self.compute.carved >= max([config.num_channels or 2 for _, config in self.route.table] or [2])

    def run(self):
        return self.route.run()


def both_sides(options: OnlineOptions):
    space = LaunchSpace(sm_carveouts=(0, 4, 8), scope=LaunchScope.STEP)

    def make(problems: Problems, warm: object, num_windows: int) -> Study:
        from dataclasses import replace

        mine = tuple(replace(problem, launches=space) for problem in problems)
        return Study(mine, Guarded(BothSides(mine, inner="lagom"), mine), num_pairs=options.num_pairs)

    return make


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(job_of_threads, "study_of", both_sides)
    made = Job(options=OnlineOptions(timeout_s=20.0, num_pairs=3, watch_steps=8))
    made.routes = [Runnable(route, FakeCompute()) for route in made.routes]  # type: ignore[misc]
    return made


def test_both_sides_switch_at_the_commit_and_go_back_at_the_close() -> None:
    route, compute = SimulatedRoute(0, 2), FakeCompute()
    both = BothSidesRoute(route, compute)
    assert (both.name, both.description) == ("simulated", "formulas; a fake")
    both.prepare(ConfigTable({KEYS[0]: CommConfig(num_channels=4)}, {KEYS[0]: EIGHT}), 1)
    assert not compute.applied
    assert both.launch == UNTOUCHED_LAUNCH
    both.commit(1)
    assert compute.applied == [EIGHT]
    assert both.launch == EIGHT
    assert len(route.table) == 1
    both.prepare(ConfigTable({}, {KEYS[0]: LaunchConfig(sm_carveout=4), KEYS[1]: EIGHT}), 2)
    both.commit(2)
    assert compute.applied == [EIGHT]  # nothing changes, nothing is called
    both.prepare(ConfigTable({}), 3)
    both.commit(3)
    assert compute.applied == [EIGHT, UNTOUCHED_LAUNCH]
    both.close()
    assert (compute.num_closed, route.is_closed) == (1, True)


def test_a_commit_that_is_taken_back_leaves_both_sides_as_they_were() -> None:
    route, compute = SimulatedRoute(0, 2), FakeCompute()
    both = BothSidesRoute(route, compute)
    both.prepare(ConfigTable({KEYS[0]: CommConfig(num_channels=4)}, {KEYS[0]: EIGHT}), 1)
    both.commit(1)
    both.prepare(ConfigTable({}), 2)
    both.commit(2)
    both.take_back(1)  # an earlier epoch: too late
    assert both.launch == UNTOUCHED_LAUNCH
    both.take_back(2)
    assert both.launch == EIGHT
    assert len(route.table) == 1
    assert compute.applied == [EIGHT, UNTOUCHED_LAUNCH, EIGHT]


def test_what_one_side_refuses_changes_neither() -> None:
    route, compute = SimulatedRoute(0, 2), FakeCompute()
    both = BothSidesRoute(route, compute)
    with pytest.raises(BackendError, match="no such number"):
        both.prepare(ConfigTable({}, {KEYS[0]: LaunchConfig(sm_carveout=12)}), 1)
    assert route.prepared is None
    route.fails_at = 2
    with pytest.raises(BackendError, match="no space"):
        both.prepare(ConfigTable({}, {KEYS[0]: EIGHT}), 2)
    assert not compute.applied


def test_a_carve_out_that_fails_after_all_agreed_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    compute = FakeCompute()
    compute.breaks = True
    both = BothSidesRoute(SimulatedRoute(0, 2), compute)
    both.prepare(ConfigTable({}, {KEYS[0]: EIGHT}), 1)
    with caplog.at_level(logging.WARNING):
        both.commit(1)
    assert "driver gone" in caplog.text
    assert both.launch == UNTOUCHED_LAUNCH


def test_without_a_gpu_it_refuses_in_words_and_leaves_the_rest_alone() -> None:
    none = NoComputeRoute("no CUDA device")
    both = BothSidesRoute(SimulatedRoute(0, 2), none)
    assert "no CUDA device" in both.description
    both.prepare(ConfigTable({KEYS[0]: CommConfig(num_channels=4)}), 1)
    both.commit(1)
    for launch in (EIGHT, LaunchConfig(order=LaunchOrder.COMPUTATION_FIRST)):
        with pytest.raises(BackendError, match="no CUDA device"):
            both.prepare(ConfigTable({}, {KEYS[0]: launch}), 2)
    both.close()


def test_the_search_finds_the_carve_out_and_every_rank_runs_under_the_same(job: Job) -> None:
    records = job.run(400)
    assert not job.meeting.mismatches
    one, other = (route.compute for route in job.routes)  # type: ignore[attr-defined]
    assert one.applied == other.applied
    assert job.plans[0] == job.plans[1]
    assert job.members[0].plan.state == SwitchState.WATCH
    assert "new settings save" in job.members[0].plan.reason
    assert one.carved
    assert job.routes[0].holds()  # type: ignore[attr-defined]
    assert records[0][-1].duration_s < 0.75 * records[0][0].duration_s
    assert {setting.launch for setting in job.members[0].settings} == {one.applied[-1]}


def test_what_was_found_starts_the_next_job(job: Job, tmp_path: Path) -> None:
    job.run(400)
    settings = job.members[0].settings
    saved = SavedSettings(
        world_size=2, route="simulated", is_adopted=True, settings=settings, verdict="tuned", date="2026-01-01"
    )
    write_saved(tmp_path / "lagom.json", saved)
    assert '"sm_carveout"' in (tmp_path / "lagom.json").read_text()
    started = read_saved(tmp_path / "lagom.json").settings
    assert started == settings
    again = Job(options=job.options, started=started)
    again.routes = [Runnable(route, FakeCompute()) for route in again.routes]  # type: ignore[misc]
    again.run(7)
    assert [route.compute.carved for route in again.routes] == [job.routes[0].compute.carved] * 2  # type: ignore[attr-defined]


def test_a_rank_that_cannot_follow_stops_the_tuning_on_all(job: Job) -> None:
    able, other = job.routes
    unable = BothSidesRoute(other.route, NoComputeRoute("no CUDA device"))  # type: ignore[attr-defined]
    unable.run = other.route.run  # type: ignore[attr-defined]
    job.routes = [able, unable]  # type: ignore[list-item]
    job.run(60)
    assert not able.compute.carved  # type: ignore[attr-defined]
    assert not job.members[0].settings
    assert "no CUDA device" in job.members[0].plan.reason
    assert not job.meeting.mismatches


def test_a_journal_with_carve_outs_is_taken_up_again(job: Job, tmp_path: Path) -> None:
    job.journals = (JournalFile(tmp_path / "journal.jsonl"), None)
    job.run(150)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert any('"launch":{"sm_carveout":' in line for line in lines)
    again = Job(options=job.options, journals=(JournalFile(tmp_path / "journal.jsonl"), None))
    again.routes = [Runnable(route, FakeCompute()) for route in again.routes]  # type: ignore[misc]
    again.run(10)
    assert again.leader is not None
    assert again.leader.study is not None
    assert len(again.leader.study.entries) >= len(lines) - 1


def test_settings_without_a_launch_are_written_as_before() -> None:
    call = CallType(
        description="fsdp", num_ranks=2, creation_order=0, kind=CollectiveKind.ALL_GATHER, num_bytes=GATHERED
    )
    plain = SiteSetting(Site(call, 0), CommConfig(num_channels=4))
    carved = SiteSetting(Site(call, 1), CommConfig(), EIGHT)
    plan = WindowPlan(window=0, state=SwitchState.SEARCH, reason="", settings=(plain, carved))
    text = encode(plan)
    assert text.count("sm_carveout") == 1
    assert decode(text.encode(), WindowPlan) == plan
    table = table_of(plan.settings, [RANKS])
    assert len(table) == 1  # an untouched call needs no row
    assert dict(table.launches) == {KEYS[1]: EIGHT}


@pytest.mark.parametrize("values", [(4, 4), (8, 4), (-1,)])
def test_carve_outs_out_of_order_are_refused(values: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sm_carveouts"):
        OnlineOptions(sm_carveouts=values)


@pytest.mark.torch
def test_torchs_flag_is_set_and_given_back() -> None:
    import torch

    from lagom_overlap.engines.carve_out import TorchCarveOut, carve_out_support
    from lagom_overlap.online.routes.carve_out import CarveOutRoute, open_compute_route

    if torch.cuda.is_available():
        assert not carve_out_support().why_not
    else:
        assert "no CUDA device" in carve_out_support().why_not
        with pytest.raises(BackendError, match="no kernel would heed"):
            TorchCarveOut()
        assert isinstance(open_compute_route(), NoComputeRoute)
    before = torch._C._get_sm_carveout_experimental()
    flag = object.__new__(TorchCarveOut)  # as on a Hopper, whose flag this is without a device, too
    flag.num_sms, flag.caveat, flag._before = 132, "", before
    route = CarveOutRoute(flag)
    try:
        route.apply(EIGHT)
        assert torch._C._get_sm_carveout_experimental() == 8
        for launch, words in (
            (LaunchConfig(sm_carveout=132), "leaves none"),
            (LaunchConfig(order=LaunchOrder.COMPUTATION_FIRST), "framework's"),
            (LaunchConfig(priority=StreamPriority.NORMAL), "framework's"),
        ):
            with pytest.raises(BackendError, match=words):
                route.check(launch)
        route.apply(UNTOUCHED_LAUNCH)
        assert torch._C._get_sm_carveout_experimental() == before
        route.apply(EIGHT)
    finally:
        route.close()
    assert torch._C._get_sm_carveout_experimental() == before


@pytest.mark.torch
def test_the_environment_of_a_launched_job_names_a_carve_out(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from lagom_overlap.online.launch_fixed import carved_out

    assert carved_out({}, 0) is None
    with pytest.raises(JobError, match="LAGOM_SM_CARVEOUT is 'eight'"):
        carved_out({"LAGOM_SM_CARVEOUT": "eight"}, 0)
    compute = carved_out({"LAGOM_SM_CARVEOUT": "8"}, 0)
    if torch.cuda.is_available():
        assert compute is not None
        assert torch._C._get_sm_carveout_experimental() == 8
        compute.close()
    else:
        assert compute is None
        assert "LAGOM_SM_CARVEOUT=8 has no effect" in capsys.readouterr().err


@pytest.mark.torch
def test_carve_outs_that_cannot_be_set_are_left_out_of_the_search_in_words(caplog: pytest.LogCaptureFixture) -> None:
    from lagom_overlap.online.tuner import _settable

    wanted = OnlineOptions(sm_carveouts=(4, 8))
    with caplog.at_level(logging.WARNING):
        assert _settable(wanted, NoComputeRoute("no CUDA device")).sm_carveouts == ()
        assert "no CUDA device; tuning the collectives only" in caplog.text
        assert _settable(OnlineOptions(sm_carveouts=(4, 16)), FakeCompute()).sm_carveouts == ()
        caplog.clear()
        assert _settable(wanted, FakeCompute()) == wanted
        assert "are not searched: tuner 'ours'" in caplog.text
    assert _settable(OnlineOptions(), NoComputeRoute("no CUDA device")) == OnlineOptions()
