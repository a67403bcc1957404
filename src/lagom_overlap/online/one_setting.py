"""A job that `lagom run` started and that runs under one setting, or none, from its first step to its last."""

from functools import partial

from torch import distributed as dist
from torch import nn

from lagom_overlap.collective.sites import SiteSetting
from lagom_overlap.online.agreed_table import meet
from lagom_overlap.online.device import longest_wait_s
from lagom_overlap.online.job_store import roll_call, store_of, tell_others
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.exchange import Exchange, StoreLost
from lagom_overlap.online.ranks.presence import say_off


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

    def release(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing: what is in force ends with the job."""


def meet_all() -> Exchange:
    """The exchange in which all ranks agree on what is set, once.

    Raises:
        StoreLost: if the store does not answer; the others are told, where that is possible.
    """
    timeout_s, num_ranks = OnlineOptions().timeout_s, dist.get_world_size()
    try:
        return meet(
            lambda name: store_of(name, timeout_s),
            rank=dist.get_rank(),
            num_ranks=num_ranks,
            timeout_s=timeout_s,
            trouble=roll_call(num_ranks, timeout_s),
            longest_s=longest_wait_s,
        )
    except StoreLost as error:
        tell_others(partial(say_off, why=str(error)))
        raise
