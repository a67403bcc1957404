"""What is done with a job that `lagom run` started; `launch_session` tells it the job's steps."""

from typing import Protocol

from torch import nn

from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.results.conclusion import Conclusion


class Session(Protocol):
    """What is done with a job."""

    def steady(self) -> tuple[SiteSetting, ...] | None:
        """The settings under which steps run as they would go on to; None while something is tried."""

    def why_void(self) -> str:
        """Why the times of its steps say nothing of what was asked for; empty if they do."""

    def conclusion(self) -> Conclusion:
        """What came of it, once it is closed."""

    def on_model(self, model: nn.Module) -> None:
        """The model is known; its first step follows."""

    def on_step(self) -> None:
        """A step begins."""

    def on_update(self) -> None:
        """An optimizer has made its step."""

    def may_end(self) -> bool:
        """Whether this rank can end it alone, between two steps, while the others go on."""

    def close(self) -> None:
        """The job ends."""


class OneSetting:
    """The part of a `Session` that a job has which runs under one setting from its first step to its last."""

    def on_model(self, model: nn.Module) -> None:
        """Nothing."""

    def on_step(self) -> None:
        """Nothing."""

    def on_update(self) -> None:
        """Nothing."""

    @staticmethod
    def may_end() -> bool:
        """Always: what is in force stays so without any further action of this rank."""
        return True

    @staticmethod
    def steady() -> tuple[SiteSetting, ...]:
        """One setting throughout."""
        return ()

    def close(self) -> None:
        """Nothing: what is in force ends with the job."""
