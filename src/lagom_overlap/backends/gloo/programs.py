"""Programs on gloo ranks: their operators timed alone, and the program run against its plan."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from lagom_overlap.backends.gloo.link import EmulatedLink
from lagom_overlap.backends.gloo.ranks import RankProcesses
from lagom_overlap.backends.gloo.torch_extra import require_torch
from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.engines.cpu_limits import ELEMENT_BYTES
from lagom_overlap.engines.fx.commands import (
    PlanRun,
    Profiled,
    ProfileProgram,
    Refused,
    RunPlan,
    RunSettings,
    ScriptProgram,
    Traced,
    TraceSteps,
)
from lagom_overlap.engines.messages import Command
from lagom_overlap.errors import BackendError, JobError
from lagom_overlap.units import GBIT_PER_S
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.rewrite.steps import Rewrite
from lagom_overlap.workload.rewrite.tables import table_of

_CALLS: Final = {
    CollectiveKind.ALL_GATHER: "all_gather_into_tensor({shard}, {ranks}, name)",
    CollectiveKind.REDUCE_SCATTER: "reduce_scatter_tensor({whole}, 'sum', {ranks}, name)",
    CollectiveKind.ALL_REDUCE: "all_reduce({whole}, 'sum', name)",
}


def can_time(collective: Collective, num_ranks: int) -> bool:
    """Whether `ProgramRanks.time_collectives` can run it: of a known kind, over all ranks, in whole elements."""
    shard_bytes, rest = divmod(collective.num_bytes, collective.num_ranks)
    is_whole = not rest and shard_bytes > 0 and shard_bytes % ELEMENT_BYTES == 0
    return collective.kind in _CALLS and collective.num_ranks == num_ranks and is_whole


def _script_of(collectives: Sequence[Collective]) -> str:
    """A program of these collectives, one after the other."""
    lines = [
        "import torch",
        "from torch import distributed as dist",
        "C10D = torch.ops._c10d_functional",
        "def collectives():",
        "    return step, [torch.zeros(size) for size in SIZES]",
        "def step(*given):",
        "    name = dist.group.WORLD.group_name",
    ]
    sizes = []
    for number, collective in enumerate(collectives):
        elements = collective.num_bytes // ELEMENT_BYTES
        is_shard = collective.kind is CollectiveKind.ALL_GATHER
        sizes.append(elements // collective.num_ranks if is_shard else elements)
        prefix = f"given[{number}]"
        call = _CALLS[collective.kind].format(shard=prefix, whole=prefix, ranks=collective.num_ranks)
        lines.append(f"    out_{number} = C10D.wait_tensor(C10D.{call})")
    outs = ", ".join(f"out_{number}" for number in range(len(collectives)))
    return "\n".join([*lines, f"    return ({outs},)", f"SIZES = {sizes}", ""])


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
        self._program = ScriptProgram(str(script.resolve()), function)
        self.num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._link = EmulatedLink(link_bytes_per_s, num_ranks) if link_bytes_per_s is not None else None
        try:
            self._ranks = RankProcesses(num_ranks, prefix=self._link.prefix if self._link else ())
        except BaseException:
            if self._link:
                self._link.close()
            raise
        pinned = min(self._ranks.ready.cores) >= 0
        emulated = (
            f", EMULATED link of {link_bytes_per_s / GBIT_PER_S:g} Gbit/s" if link_bytes_per_s is not None else ""
        )
        self.description = (
            f"gloo (torch {self._ranks.ready.torch_version}), {num_ranks} ranks on this machine, "
            f"{'each pinned to a core' if pinned else 'not pinned (fewer cores than ranks)'}{emulated}"
        )

    def profile(self, repeats: int) -> Profiled:
        """Mean seconds of each operator alone, and the rates at which collectives and computations run together.

        Raises:
            JobError: if the program cannot be loaded or traced.
            RankError: if a rank ends or takes too long.
        """
        command = ProfileProgram(self._program, repeats, side_by_side=True)
        reply = self._ask(command, "timing the program's operators")
        if not isinstance(reply, Profiled):
            raise BackendError(f"rank 0 said {reply}, expected times")
        return reply

    def time_collectives(self, collectives: Sequence[Collective], repeats: int) -> dict[Collective, float]:
        """Mean seconds of collectives over all ranks alone, of the slowest rank; fp32, on data of their own.

        Raises:
            ValueError: if one runs over some of the ranks only, or is of a kind that `can_time` refuses.
            RankError: if a rank ends or takes too long.
        """
        if not all(can_time(collective, self.num_ranks) for collective in collectives):
            raise ValueError(f"only {', '.join(_CALLS)} over all {self.num_ranks} ranks can be timed")
        if not collectives:
            return {}
        with TemporaryDirectory(prefix="lagom-") as folder:
            script = Path(folder) / "collectives.py"
            script.write_text(_script_of(collectives), encoding="utf-8")
            program = ScriptProgram(str(script), "collectives")
            reply = self._ask(ProfileProgram(program, repeats), "timing pieces of collectives")
        if not isinstance(reply, Profiled):
            raise BackendError(f"rank 0 said {reply}, expected times")
        return dict(zip(collectives, reply.seconds.values(), strict=True))

    def run(self, rewrites: Iterable[Rewrite], *, rounds: int, seed: int, graph: str) -> PlanRun:
        """The program against its plan; raises like `profile`, and JobError for a plan of another graph."""
        tables = tuple(table_of(rewrite) for rewrite in rewrites)
        return self._run(RunPlan(self._program, tables, rounds, seed, graph), "running the plan")

    def trace(self, path: Path, num_steps: int) -> None:
        """The program's `TrainingStep` under PyTorch's profiler: rank 0's trace, in a file.

        Raises:
            JobError: if it makes none, or it fails.
            RankError: if a rank ends or takes too long.
        """
        reply = self._ask(TraceSteps(self._program, num_steps, str(path)), "recording the training step")
        if not isinstance(reply, Traced):
            raise BackendError(f"rank 0 said {reply}, expected a trace")

    def run_settings(self, settings: Fsdp2Settings, *, rounds: int, seed: int) -> PlanRun:
        """The `TrainingStep` as FSDP2 runs it against the same with settings; raises like `trace`."""
        return self._run(RunSettings(self._program, settings, rounds, seed), "running FSDP2 with the plan's settings")

    def _run(self, command: RunPlan | RunSettings, what: str) -> PlanRun:
        reply = self._ask(command, what)
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
