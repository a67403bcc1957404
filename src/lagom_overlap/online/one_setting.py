"""A job that `lagom run` started and that runs under one setting, or none, from its first step to its last."""

from torch import nn

from lagom_overlap.collective.sites import SiteSetting


class OneSetting:
    """What `launch_session.Session` asks of a job that runs under one setting from its first step to its last."""

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
