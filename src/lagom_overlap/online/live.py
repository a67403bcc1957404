"""What online tuning does, told to the job's own logger while it runs: `OnlineTuner(on_event=...)`.

A listener is any function of a `TuningEvent`; `to_tensorboard` and `to_wandb` make one of a writer or run that the job
already has, so that neither library is needed here.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningEvent:
    """A change of what online tuning does, after training step `step` (counted from 1 since the tuner was made).

    A step that failed counts, too; 0 is before the first step, where a tuner takes no part.
    `state` is one of `SwitchState`, `words` the same for people, `reason` why, `num_settings` how many call sites are
    set to something.
    """

    step: int
    state: str
    words: str
    reason: str
    num_settings: int


OnEvent: TypeAlias = Callable[[TuningEvent], None]


class Announcer:
    """Tells a listener what changed since the last step; one that fails is told nothing more, and the job goes on."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event: OnEvent | None = on_event
        self._last: tuple[str, str, int] | None = None

    def after_step(self, step: int, state: str, words: str, reason: str, num_settings: int) -> None:
        """Tells of a step if anything differs from the last."""
        now = (state, reason, num_settings)
        if now == self._last or self._on_event is None:
            return
        self._last = now
        event = TuningEvent(step=step, state=state, words=words, reason=reason, num_settings=num_settings)
        try:
            self._on_event(event)
        except Exception as error:  # whatever the listener does, training goes on
            _log.warning("on_event is told nothing more: it raised %s: %s", type(error).__name__, error)
            self._on_event = None


class TensorBoardWriter(Protocol):
    """What is used of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Adds a number."""

    def add_text(self, tag: str, text_string: str, global_step: int) -> object:
        """Adds a text."""


class WandbRun(Protocol):
    """What is used of a run that `wandb.init` returns."""

    def log(self, data: Mapping[str, object]) -> object:
        """Logs values."""


def to_tensorboard(writer: TensorBoardWriter) -> OnEvent:
    """A listener that writes `lagom/settings` and the text `lagom/state`."""

    def write(event: TuningEvent) -> None:
        writer.add_scalar("lagom/settings", event.num_settings, event.step)
        writer.add_text("lagom/state", f"{event.words}: {event.reason}", event.step)

    return write


def to_wandb(run: WandbRun) -> OnEvent:
    """A listener that logs `lagom/step`, `lagom/settings`, `lagom/state` and `lagom/reason`."""

    def write(event: TuningEvent) -> None:
        run.log(
            {
                "lagom/step": event.step,
                "lagom/settings": event.num_settings,
                "lagom/state": event.state,
                "lagom/reason": event.reason,
            }
        )

    return write
