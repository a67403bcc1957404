from pathlib import Path

import pytest

from lagom_overlap.online.live import Announcer, TuningEvent, to_tensorboard, to_wandb

EVENT = TuningEvent(step=3, state="search", words="trying settings", reason="channels 2", num_settings=4)


def test_a_listener_hears_of_changes_only() -> None:
    heard: list[TuningEvent] = []
    announcer = Announcer(heard.append)
    told = (("record", "a"), ("record", "a"), ("search", "b"), ("search", "c"), ("search", "c"))
    for step, (state, reason) in enumerate(told, 1):
        announcer.after_step(step, state, state, reason, 0)
    assert [(event.step, event.state, event.reason) for event in heard] == [
        (1, "record", "a"),
        (3, "search", "b"),
        (4, "search", "c"),
    ]


class Part:
    """A rank's part in the tuning, which leaves it when a step fails."""

    settings = ()
    num_steps = 0
    reason = "recording"

    @property
    def plan(self):
        from lagom_overlap.online.ranks.messages import SwitchState, WindowPlan

        return WindowPlan(window=0, state=SwitchState.RECORD, reason=self.reason)

    def begin_step(self):
        pass

    def end_step(self):
        self.num_steps += 1

    def fail_step(self, reason):
        self.num_steps, self.reason = self.num_steps + 1, reason


@pytest.fixture
def alone():
    """A tuner of a job of one rank, and what its listener heard."""
    dist = pytest.importorskip("torch.distributed")
    from torch import nn

    from lagom_overlap.online.tuner import OnlineTuner

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    heard: list[TuningEvent] = []
    yield OnlineTuner(nn.Linear(2, 2), on_event=heard.append), heard
    dist.destroy_process_group()


def test_a_tuner_that_takes_no_part_says_so_once_and_why(alone) -> None:
    tuner, heard = alone
    with tuner.step():
        pass
    assert [(event.step, event.state, event.reason) for event in heard] == [
        (0, "off", "one rank has no collectives to tune")
    ]


def test_a_failed_step_is_counted_and_told(alone) -> None:
    tuner, heard = alone
    tuner._member = Part()
    heard.clear()
    with tuner.step():
        pass
    with pytest.raises(KeyError), tuner.step():
        raise KeyError
    tuner._member.reason = "again"
    with tuner.step():
        pass
    assert [(event.step, event.reason) for event in heard] == [
        (1, "recording"),
        (2, "its step ended with KeyError"),
        (3, "again"),
    ]
    tuner._member = None


def test_a_listener_that_fails_ends_no_step_and_is_told_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fails(event: TuningEvent) -> None:
        calls.append(event)
        raise OSError("disk full")

    announcer = Announcer(fails)
    announcer.after_step(1, "record", "recording", "a", 0)
    announcer.after_step(2, "search", "trying", "b", 0)
    assert len(calls) == 1
    assert "on_event is told nothing more: it raised OSError: disk full" in caplog.text


def test_tensorboard_gets_the_number_of_settings_and_the_state(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        to_tensorboard(writer)(EVENT)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    [settings] = found.Scalars("lagom/settings")
    assert (settings.step, settings.value) == (3, 4.0)
    [state] = found.Tensors("lagom/state/text_summary")
    assert state.tensor_proto.string_val == [b"trying settings: channels 2"]


def test_wandb_gets_state_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb.init(dir=str(tmp_path), project="lagom") as run:
        to_wandb(run)(EVENT)
        assert dict(run.summary)["lagom/reason"] == "channels 2"
        assert dict(run.summary)["lagom/settings"] == 4
