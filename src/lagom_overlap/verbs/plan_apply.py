"""Plan once, run it everywhere: a `plan.toml` applied on the ranks of the user's own job.

Planners are given time, so planning on every rank may end with as many plans. Here every rank reads a file instead; the
ranks compare the order in which they will call collectives, and where one differs nothing is run. Needs torch.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from lagom_overlap.capturing.fake_tensor import TrainingStep
from lagom_overlap.capturing.fx import FxCapture, capture_fx
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.engines.fx.agreement import check_able, check_agreement, signature
from lagom_overlap.engines.fx.apply import apply_rewrites
from lagom_overlap.engines.fx.commands import Refused
from lagom_overlap.engines.fx.cuda_streams import CudaStep
from lagom_overlap.engines.fx.fsdp2 import make_calls, setting_calls
from lagom_overlap.engines.fx.inductor_pass import PlanPass
from lagom_overlap.engines.fx.process_groups import ProcessGroups
from lagom_overlap.engines.fx.slide import check_replicated
from lagom_overlap.engines.fx.streams import StreamedStep
from lagom_overlap.engines.fx.training_session import compared
from lagom_overlap.errors import BackendError, JobError, LagomError
from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.record import create_folder, write_private
from lagom_overlap.tuners.sequential import Judgement, judged_pairs
from lagom_overlap.verbs.plan_file import read_fsdp2_settings, read_rewrites, rewrites_toml
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.iteration import graph_digest
from lagom_overlap.workload.rewrite.steps import Rewrite
from lagom_overlap.workload.rewrite.tables import table_of

_STEPS = count()


class _Found(msgspec.Struct, frozen=True):
    """What a rank says of its plan: a digest of the rewrites, or why it cannot be applied."""

    digest: str = ""
    refused: str = ""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan's file in a planner's place, or a folder of `save_plans`: what `PlanPass` asks for rewrites."""

    path: Path

    def __call__(self, capture: IssuedStep, times_s: Mapping[str, float] = MappingProxyType({})) -> tuple[Rewrite, ...]:
        """The file's rewrites, checked against a captured graph; times of its operators change nothing.

        Raises:
            JobError: if the file is no plan, or one for another graph or number of ranks.
        """
        path = self.path
        if path.is_dir():
            path /= f"{graph_digest(capture.iteration)}.toml"
            if not path.exists():
                raise JobError(f"{str(self.path)!r} has no plan of this graph: {path.name!r} is missing")
        return read_rewrites(path, capture.iteration, capture.num_ranks)


def save_plans(plan_pass: PlanPass, folder: Path) -> tuple[Path, ...]:
    """Writes the plan of every graph that was compiled into a new folder, each named by its graph; on rank 0 alone.

    `PlanFile(folder)` then decides for the same program wherever it is compiled again, without a search or a clock.

    Raises:
        OutputError: if the folder exists already, or cannot be written.
    """
    if dist.get_rank() != 0:
        return ()
    create_folder(folder)
    paths = []
    for seen in plan_pass.seen:
        iteration = seen.capture.iteration
        paths.append(folder / f"{graph_digest(iteration)}.toml")
        text = rewrites_toml(
            "compiled",
            seen.rewrites,
            iteration,
            seen.capture.num_ranks,
            planner="compiled",
            carrier=Carrier.INDUCTOR,
        )
        write_private(paths[-1], text)
    return tuple(paths)


def apply_fsdp2(
    model: torch.nn.Module, plan: Path | Fsdp2Settings, *, units: Sequence[torch.nn.Module] | None = None
) -> None:
    """Tells FSDP2 a plan's settings: on every rank, behind `fully_shard` and before the first forward.

    `plan` is the plan.toml of `lagom plan --for fsdp2`, or settings. `units` are the sharded modules in the order of
    their forward, where the plan names them otherwise. What is computed stays the same, bit for bit, unless
    the plan sets `reduce_in_param_dtype`, which rounds gradients.

    Raises:
        JobError: if the file is for another carrier or number of ranks, or the model's units are not the plan's.
        BackendError: if ranks have different settings, or one has none. Whatever is raised: nothing is set, on no rank.
    """
    failed, calls, mine = None, [], ""
    try:
        settings = plan if isinstance(plan, Fsdp2Settings) else read_fsdp2_settings(plan, dist.get_world_size())
        calls, mine = setting_calls(model, settings, units), msgspec.json.encode(settings).decode()
    except LagomError as error:
        failed = error
    if dist.get_backend() != "fake":  # a capture has one rank
        store, name, rank = distributed_c10d._get_default_store(), f"lagom/fsdp2/{next(_STEPS)}", dist.get_rank()
        store.set(f"{name}/{rank}", f"no {failed}" if failed else mine)
        for other in range(0 if failed else dist.get_world_size()):
            theirs = store.get(f"{name}/{other}").decode()
            if theirs.startswith("no "):
                raise BackendError(f"rank {other}: {theirs.removeprefix('no ')}; nothing was set")
            if theirs != mine:
                raise BackendError(f"ranks {rank} and {other} have different settings for FSDP2; nothing was set")
    if failed:
        raise failed
    make_calls(calls)


class DefaultGroupRanks:
    """Agreement between the ranks of a user's job, on its default group and between measurements only."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def barrier(self) -> None:
        """Returns when every rank has come; nothing of before is left on a GPU."""
        self.maxima([0.0])
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def maxima(self, values: list[float]) -> list[float]:
        """Each value's maximum over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [float(value) for value in tensor.cpu()]

    def gather(self, value: int) -> tuple[int, ...]:
        """Every rank's number, by rank."""
        gathered = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=self._device)
        gathered[dist.get_rank()] = value
        dist.all_reduce(gathered)
        return tuple(int(one) for one in gathered.cpu())


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsRun:
    """FSDP2's own step against the same with a plan's settings, step by step in shuffled order.

    Seconds are the slowest rank's. `max_error` is the largest difference of a loss, or of a parameter at the end
    (or a gradient that no optimizer clears; with `reduce_in_param_dtype` losses alone), relative to the largest value
    in it; 0 is equal bit for bit. `judgement` is the sequential test's.
    """

    before_s: tuple[float, ...]
    after_s: tuple[float, ...]
    max_error: float
    judgement: Judgement


def measure_fsdp2(
    build: Callable[[], TrainingStep], plan: Path | Fsdp2Settings, *, rounds: int = 11, seed: int = 0
) -> SettingsRun:
    """A plan's settings tried in the user's own launch, on GPUs or not: an A/B of the step that `build` makes.

    Every rank calls it, torch.distributed being initialised. `build` makes model, optimizer and inputs anew and is
    called twice, so two copies must fit the memory. Nothing is adopted: `apply_fsdp2` does that.

    Raises:
        JobError: if the plan is not of this model and number of ranks, or `build` fails. No rank trains then.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    ranks = DefaultGroupRanks(device)
    settings, reason = None, ""
    try:
        settings = plan if isinstance(plan, Fsdp2Settings) else read_fsdp2_settings(plan, dist.get_world_size())
    except LagomError as error:
        reason = str(error)
    able = ranks.gather(int(settings is not None))
    if not all(able) or settings is None:
        raise JobError(reason or f"rank {able.index(0)} has no plan; nothing was run")
    text = hashlib.sha256(msgspec.json.encode(settings)).digest()
    if len(set(ranks.gather(int.from_bytes(text[:7], "big")))) > 1:
        raise BackendError("ranks have different settings for FSDP2; nothing was run")
    run = compared(build, settings, ranks, rounds=rounds, seed=seed)
    if isinstance(run, Refused):
        raise JobError(run.reason)
    before, after = run.before.makespan_s, run.after.makespan_s
    return SettingsRun(before_s=before, after_s=after, max_error=run.max_error, judgement=judged_pairs(before, after))


def planned_step(step: Callable[..., Any], inputs: Sequence[Any], plan: Path) -> StreamedStep | CudaStep:
    """The step under a plan, ready to run on this rank: `planned_step(...).run(inputs).outputs`; close it.

    Every rank calls it with its own inputs and its own copy of the file, once the default process group is open. The
    step is as for a job's `[program]`; nothing of it is computed yet. With inputs on a GPU collectives run on CUDA's
    streams, else on threads.

    Raises:
        JobError: if the step cannot be traced, or the file is no plan of it. The other ranks are told, and raise too.
        BackendError: if ranks have different plans, or would call collectives in different orders.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    store, name = distributed_c10d._get_default_store(), f"lagom/planned_step/{next(_STEPS)}"
    captured, rewrites, order = _checked(step, inputs, plan)
    store.set(f"{name}/found/{rank}", msgspec.json.encode(order).decode())
    every = [msgspec.json.decode(store.get(f"{name}/found/{other}"), type=_Found) for other in range(num_ranks)]
    for other, refusal in enumerate(every):
        if refusal.refused:
            raise JobError(refusal.refused if other == rank else f"rank {other}: {refusal.refused}")
    for other, refusal in enumerate(every):
        if refusal.digest != every[0].digest:  # before groups are made, which hangs where ranks make different ones
            raise BackendError(f"ranks 0 and {other} have different plans in {str(plan)!r}; nothing was run")
    assert captured is not None
    groups = ProcessGroups()
    refused = ""
    try:
        planned = apply_rewrites(captured.graph_module, captured.iteration, rewrites, groups)
    except LagomError as error:
        refused = str(error)
    check_able(refused, store, rank=rank, num_ranks=num_ranks, step=name)
    asked = count()

    def gather(value: int) -> tuple[int, ...]:
        key = f"{name}/input{next(asked)}"
        store.set(f"{key}/{rank}", str(value))
        return tuple(int(store.get(f"{key}/{other}")) for other in range(num_ranks))

    lines = signature(planned.graph, groups.ranks)
    check_agreement(lines, store, rank=rank, num_ranks=num_ranks, step=name)
    check_replicated(planned, inputs, gather)
    on_gpu = any(isinstance(one, torch.Tensor) and one.is_cuda for one in inputs)
    return CudaStep(planned, groups) if on_gpu else StreamedStep(planned, groups)


def _checked(
    step: Callable[..., Any], inputs: Sequence[Any], plan: Path
) -> tuple[FxCapture | None, tuple[Rewrite, ...], _Found]:
    """The traced step and the plan's rewrites on this rank, or why there are none."""
    try:
        with torch.enable_grad():
            captured = capture_fx(step, tuple(inputs), is_fake=True)
        kinds = {op.collective.kind for op in captured.iteration.comms}
        is_others = dist.get_rank() > 0 and CollectiveKind.ALL_TO_ALL in kinds
        rewrites = read_rewrites(plan, captured.iteration, dist.get_world_size(), other_rows=is_others)
    except LagomError as error:
        return None, (), _Found(refused=str(error))
    except Exception as error:
        return None, (), _Found(refused=f"the step cannot be traced: {type(error).__name__}: {error}")
    digest = hashlib.sha256(msgspec.json.encode([table_of(rewrite) for rewrite in rewrites])).hexdigest()
    return captured, rewrites, _Found(digest=digest)
