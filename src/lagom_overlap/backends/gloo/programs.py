"""Programs on gloo ranks: their operators timed alone, and the program run beside its plan."""

from collections.abc import Iterable
from pathlib import Path

from lagom_overlap.backends.gloo.link import EmulatedLink
from lagom_overlap.backends.gloo.ranks import RankProcesses
from lagom_overlap.backends.gloo.torch_extra import require_torch
from lagom_overlap.engines.messages import Command
from lagom_overlap.engines.planned.commands import PlanRun, Profiled, ProfileProgram, Program, Refused, RunPlan
from lagom_overlap.errors import BackendError, JobError
from lagom_overlap.workload.rewrite.steps import Rewrite
from lagom_overlap.workload.rewrite.tables import table_of


class ProgramRanks:
    """Ranks on this machine that run one program; close them."""

    def __init__(
        self, script: Path, function: str, *, num_ranks: int, link_bytes_per_s: float | None, timeout_s: float
    ) -> None:
        """Starts them, on an emulated link if a rate is given.

        Raises:
            BackendError: if the machine does not fit, RankError if a rank ends.
        """
        require_torch()
        self._program = Program(str(script.resolve()), function)
        self._timeout_s = timeout_s
        self._link = EmulatedLink(link_bytes_per_s, num_ranks) if link_bytes_per_s is not None else None
        try:
            self._ranks = RankProcesses(num_ranks, prefix=self._link.prefix if self._link else ())
        except BaseException:
            if self._link:
                self._link.close()
            raise
        pinned = min(self._ranks.ready.cores) >= 0
        emulated = f", EMULATED link of {link_bytes_per_s:g} bytes/s" if link_bytes_per_s is not None else ""
        self.description = (
            f"gloo (torch {self._ranks.ready.torch_version}), {num_ranks} ranks on this machine, "
            f"{'each pinned to a core' if pinned else 'not pinned (fewer cores than ranks)'}{emulated}"
        )

    def profile(self, repeats: int) -> dict[str, float]:
        """Median seconds of each operator alone, of the slowest rank.

        Raises:
            JobError: if the program cannot be loaded or traced.
            RankError: if a rank ends or takes too long.
        """
        reply = self._ask(ProfileProgram(self._program, repeats), "timing the program's operators")
        if not isinstance(reply, Profiled):
            raise BackendError(f"rank 0 said {reply}, expected times")
        return reply.seconds

    def run(self, rewrites: Iterable[Rewrite], *, rounds: int, seed: int, graph: str) -> PlanRun:
        """The program beside its plan; raises like `profile`, and JobError for a plan of another graph."""
        tables = tuple(table_of(rewrite) for rewrite in rewrites)
        reply = self._ask(RunPlan(self._program, tables, rounds, seed, graph), "running the plan")
        if not isinstance(reply, PlanRun):
            raise BackendError(f"rank 0 said {reply}, expected a run")
        return reply

    def close(self) -> None:
        """Ends the ranks; safe to call twice."""
        self._ranks.close()
        if self._link:
            self._link.close()

    def _ask(self, command: Command, what: str) -> object:
        reply = self._ranks.exchange(command, what, self._timeout_s)
        if isinstance(reply, Refused):
            raise JobError(reply.reason)
        return reply
