from pathlib import Path

import pytest

from lagom_overlap.online.live import Announcer, TuningEvent, to_tensorboard, to_wandb

EVENT = TuningEvent(step=3, state="search", words="trying settings", reason="channels 2", num_settings=4)


def test_a_listener_hears_of_changes_only() -> None:
    heard: list[TuningEvent] = []
    announcer = Announcer(heard.append)
    for state, reason in (("record", "a"), ("record", "a"), ("search", "b"), ("search", "c"), ("search", "c")):
        announcer.after_step(state, state, reason, 0)
    assert [(event.step, event.state, event.reason) for event in heard] == [
        (1, "record", "a"),
        (3, "search", "b"),
        (4, "search", "c"),
    ]


def test_a_listener_that_fails_ends_no_step_and_is_told_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fails(event: TuningEvent) -> None:
        calls.append(event)
        raise OSError("disk full")

    announcer = Announcer(fails)
    announcer.after_step("record", "recording", "a", 0)
    announcer.after_step("search", "trying", "b", 0)
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
