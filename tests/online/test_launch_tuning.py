"""A rank under `lagom run`: full disks and switches thrown in one rank alone must not take it out of step."""

import contextlib
import json
import re
from dataclasses import dataclass, field
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from lagom_overlap.collective import CommConfig  # noqa: E402
from lagom_overlap.errors import OutputError  # noqa: E402
from lagom_overlap.online import launch_session  # noqa: E402
from lagom_overlap.online.events import JsonLines, PrometheusFile  # noqa: E402
from lagom_overlap.online.launch_fixed import Fixed  # noqa: E402
from lagom_overlap.online.launch_planned import AsStarted  # noqa: E402
from lagom_overlap.online.launch_session import Rank, Tuning  # noqa: E402
from lagom_overlap.online.launch_steps import is_trained  # noqa: E402
from lagom_overlap.online.options import OnlineOptions  # noqa: E402
from lagom_overlap.online.ranks.messages import SwitchState  # noqa: E402
from lagom_overlap.results.contest import ContestResult, TunerResult  # noqa: E402
from lagom_overlap.results.step_times import read_step_times  # noqa: E402
from lagom_overlap.tuners.sequential import judged_pairs  # noqa: E402

pytestmark = pytest.mark.torch


@dataclass
class Tuner:
    """In place of `OnlineTuner`: it settles in the third step, and `stops_at` it is off."""

    stops_at: int = 1000
    num_begun: int = 0
    num_ended: int = 0
    saves: list[str] = field(default_factory=list)
    error: Exception | None = None
    is_closed: bool = False

    @property
    def state(self):
        return (
            SwitchState.OFF
            if self.num_ended >= self.stops_at
            else SwitchState.WATCH
            if self.num_ended > 2
            else SwitchState.SEARCH
        )

    reason = "as the test says"
    settings = ()
    num_steps_left = 12
    contest = None

    @property
    def priorities(self):
        return {"g": {"0:ag": 0.25}} if self.state is SwitchState.SEARCH else {}

    start_check = None

    @property
    def num_steps(self):
        return self.num_ended

    def updated(self):
        assert self.num_begun == self.num_ended + 1, "an update within a step"

    @contextlib.contextmanager
    def step(self):
        self.num_begun += 1
        yield
        self.num_ended += 1

    def save(self, path):
        self.saves.append(path.name)
        if self.error is not None:
            raise self.error

    def close(self):
        self.is_closed = True


def train(model, num_steps=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.fixture
def start(tmp_path, monkeypatch):
    """(session's tuner, a training step) of a rank whose tuner is the given one"""
    ranks = []

    def begin(tuner):
        monkeypatch.setattr(launch_session, "OnlineTuner", lambda *_, **__: tuner)
        events = JsonLines(tmp_path / "events.jsonl", rank=0)
        metrics = PrometheusFile(tmp_path / "metrics.prom", rank=0)
        session = Tuning(
            events, metrics, folder=tmp_path, config=None, options=OnlineOptions(), rank=0, is_on_gloo=True
        )
        ranks.append(Rank(session, events, metrics, is_trained, folder=tmp_path))
        return partial(train, torch.nn.Linear(2, 2))

    begin.ranks = ranks
    yield begin
    for rank in ranks:
        rank.close()


class GpuEvent:
    """An event of a device that takes 1 s for every step, whenever the host has issued it."""

    def __init__(self, device):
        self.at_ms = -1.0

    def record(self):
        GpuEvent.issued += 1
        self.at_ms = GpuEvent.issued * 1e3

    def query(self):
        return True

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms


def test_steps_on_a_gpu_are_timed_by_it_and_not_by_a_host_that_runs_ahead(tmp_path, monkeypatch):
    GpuEvent.issued = 0
    monkeypatch.setattr(launch_session, "DeviceEvent", GpuEvent)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    events = JsonLines(tmp_path / "events.jsonl", rank=0)
    metrics = PrometheusFile(tmp_path / "metrics.prom", rank=0)
    rank = Rank(AsStarted({}), events, metrics, is_trained, folder=tmp_path, is_on_nccl=True)
    train(torch.nn.Linear(2, 2), 8)
    rank.close()
    times = read_step_times(tmp_path)
    assert (times.clock, times.steps_s) == ("device", (1.0,) * 7)


@pytest.mark.parametrize("error", [OutputError("cannot write 'settings.json': no space left"), KeyError("ours")])
def test_settings_that_cannot_be_saved_cost_one_line_and_no_step(start, capsys, error):
    tuner = Tuner(error=error)
    step = start(tuner)
    for _ in range(10):
        step()
    assert (tuner.num_begun, tuner.num_ended) == (10, 9), "a step that is not begun is missed by the other ranks"
    said = capsys.readouterr().err
    if isinstance(error, OutputError):
        assert tuner.saves == ["settings.json"]
        assert said.count("no space left") == 1
        assert "runs without us" not in said


def test_each_step_of_a_climb_is_said_with_its_h(start, capsys, tmp_path):
    class Climbing(Tuner):
        @property
        def reason(self):
            return f"0:ag: {2**self.num_ended} channels (ladder unit; smallest H = 0.25)"

    step = start(Climbing())
    for _ in range(3):
        step()
    said = capsys.readouterr().err
    assert "2 channels (ladder unit; smallest H = 0.25)" in said
    assert 'lagom_priority{rank="0",collective="0:ag",group="g"} 0.25' in (tmp_path / "metrics.prom").read_text()
    for _ in range(3):
        step()
    assert "lagom_priority{" not in (tmp_path / "metrics.prom").read_text(), "the search is over"


def test_the_table_of_several_tuners_is_said_and_kept_once(start, capsys, tmp_path):
    faster = judged_pairs([1.0] * 3, [0.8] * 3)
    tuner = Tuner()
    tuner.contest = ContestResult(
        tuners=(
            TunerResult(name="ours", settings={}, judgement=None, num_measurements=3, num_steps=19),
            TunerResult(
                name="lagom",
                settings={
                    "g": {"0:all_gather": CommConfig(num_channels=4), "1:all_gather": CommConfig(num_channels=4)}
                },
                judgement=faster,
                num_measurements=9,
                num_steps=61,
            ),
            TunerResult(name="autoccl", settings={}, judgement=None, num_measurements=0, num_steps=0),
        ),
        adopted=None,
        num_verdict_steps=45,
        default_step_s=0.1,
    )
    step = start(tuner)
    for _ in range(8):
        step()
    said = capsys.readouterr().err
    for line in (
        "ours - - is the default 3 19",
        "lagom 1.250x 1.250 to 1.250 faster 9 61",
        "autoccl - - did not search: out of steps 0 0",
        "lagom sets 4 channels: 2 all_gather",
        "set it: lagom run --online --tuner lagom",
    ):
        assert re.sub(" +", " ", said).count(line) == 1, said
    kept = json.loads((tmp_path / "compare.json").read_text())
    assert kept["tuners"][1]["settings"]["g"]["0:all_gather"]["num_channels"] == 4
    assert kept["tuners"][1]["judgement"]["ratio"] == pytest.approx(1.25)


def test_a_rank_that_is_disabled_alone_goes_on_until_all_ranks_are_off(start, monkeypatch):
    tuner = Tuner(stops_at=7)
    step = start(tuner)
    for _ in range(4):
        step()
    monkeypatch.setenv("LAGOM_DISABLE", "1")
    for _ in range(8):
        step()
    assert (tuner.num_begun, tuner.num_ended) == (8, 7), "off after seven steps, so the eighth is the last one begun"
    assert tuner.is_closed


def test_a_rank_may_leave_a_table_to_itself_which_goes_by_the_calls_alone():
    assert Fixed(None, {}).may_end()
    assert Fixed(object(), {}).may_end()


def test_each_state_is_one_line_with_its_steps_left_and_the_end_is_three_lines(start, tmp_path, capsys):
    step = start(Tuner())
    for _ in range(8):
        step()
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "lagom: online tuning: trying settings: as the test says, at most 12 steps",
        "lagom: online tuning: done, and watching the job's steps: as the test says, at most 12 steps",
    ]
    start.ranks[0].close()
    start.ranks[0].close()
    assert capsys.readouterr().err.splitlines() == [
        "lagom: result: nothing is set",
        "lagom: why: as the test says",
        "lagom: next: COMMAND    # as it is: there is nothing to set",
    ]
    times = read_step_times(tmp_path)
    # Three steps were searched; the eighth is not over, as far as anybody saw.
    assert (times.num_steps, len(times.steps_s), times.num_settings) == (8, 4, 0)


class TunesAgain(Tuner):
    """Settled with two settings in steps 3 and 4, then it searches again."""

    @property
    def state(self):
        return SwitchState.WATCH if self.num_ended in (3, 4) else SwitchState.SEARCH

    @property
    def settings(self):
        return ("one", "another") if self.state is SwitchState.WATCH else ()


def test_what_was_saved_before_it_tuned_again_is_there_at_the_end(start, capsys, tmp_path):
    tuner = TunesAgain()
    step = start(tuner)
    for _ in range(8):
        step()
    start.ranks[0].close()
    assert tuner.saves == ["settings.json"]
    *_, result, why, next_line = capsys.readouterr().err.splitlines()
    assert result.startswith("lagom: result: 2 call sites are set in the saved settings")
    assert "while trying settings" in why
    assert next_line == f"lagom: next: lagom run --prove {tmp_path} -- COMMAND"


def test_a_job_that_trained_nothing_that_can_be_tuned_says_so_at_its_end(start, capsys):
    start(Tuner())
    start.ranks[0].close()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "lagom: result: nothing was tuned"
    assert "DTensor" in said[1]
    assert said[2].startswith("lagom: next: lagom run --online --adapters calls -- COMMAND")


def test_a_job_whose_process_groups_are_gone_ends_with_its_conclusion_under_a_build_with_nccl(
    start, capsys, tmp_path, monkeypatch
):
    """`destroy_process_group` comes before Python's exit; what backend there was cannot be asked then."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    step = start(Tuner())
    for _ in range(4):
        step()
    start.ranks[0].close()
    said = capsys.readouterr().err
    assert "runs without us" not in said
    assert "lagom: result: " in said
    last = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["steps"]) == ("end", 4)
