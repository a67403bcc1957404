"""Random training steps, captured, and every planner's order of them against a closure by brute force.

python benchmarks/fuzz_plans.py run --first 0 --programs 100       steps of the next seeds; finds are printed
python benchmarks/fuzz_plans.py show 17                            what the step of a seed is made of, and what breaks
python benchmarks/fuzz_plans.py behind --first 0 --programs 100    how far the default planner is behind each other one

A step has dense blocks, dropout, routed experts whose counts are exchanged and read by `tolist`, branches on `item`,
rows that `nonzero` finds, waits of the host, weights that are gathered by hand, metrics that nobody reads; it is
replicated (DDP), sharded (FSDP2) or neither; its optimizer clips, unscales and skips, keeps an average of the
parameters.

The oracle sees each dispatched operator with its tensors and shares nothing with the recorder but the names that this
gave: operators depend on each other through storages that they read and write and by drawing random numbers; what comes
behind a value that the host read depends on what made that value. No part of an operator may start in a plan before
what it depends on has ended, or (pieces of both) has begun to end.

`behind` plans captured steps (even seeds) and built ones (odd seeds: parallel layouts of small decoders) with every
planner, all given the same work, in proportion to the step's operators, and compares what the simulation with
contention says of the plans.
"""

import argparse
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, Final

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef

from lagom_overlap.capturing import fake_tensor
from lagom_overlap.capturing.fake_tensor import TrainingStep, capture_step
from lagom_overlap.capturing.recorder import StepRecorder
from lagom_overlap.capturing.storages import StorageTable
from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.registry import make_planner, planner_names
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.framework_waits import FSDP2, framework_of
from lagom_overlap.planners.simulated import simulated
from lagom_overlap.planners.times import ModelTimes, origin_name
from lagom_overlap.timeline import Span
from lagom_overlap.workload import Phase
from lagom_overlap.workload.fsdp2.visits import visits_of
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.models import TransformerModel
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.rewrite.steps import Fuse
from lagom_overlap.workload.step import Unit, program_step

RANKS: Final = 4
TOKENS: Final = 256
WAITING: Final = 0.2
"""Steps in which the host waits for the device by hand."""
TOPS: Final = 2
"""Experts of a token."""
WIDTHS: Final = (128, 256, 512)
WORK: Final = 0.05
"""Millions of steps per plan: small steps, many of them."""
BEHIND: Final = 0.001
"""What the default planner may be behind another one."""
PROPERTY_WORK: Final = 0.04
"""Millions of steps per operator: what ten seconds, the default, are to a step of 1,000 operators."""
OTHERS: Final = 2
"""Planners per step besides the default one."""
PLANNERS: Final = tuple(sorted(set(planner_names()) - {"fsdp2", "ours", "joint"}))
"""Those that rewrite; `joint` counts no work and searches with the default one."""


_gather = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
"""PyTorch 2.15 renames it."""


class Dense(nn.Module):
    """Two products with what is between them, dropout perhaps."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        inner = width * random.choice((1, 2, 4))
        between = [nn.GELU(), *([nn.Dropout(0.1)] if random.random() < 0.5 else [])]
        self.body = nn.Sequential(nn.Linear(width, inner), *between, nn.Linear(inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of tokens by width."""
        return x + self.body(x)


class Routed(nn.Module):
    """Experts on all ranks; counts are exchanged and read, then tokens travel."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(width, RANKS), nn.Linear(width, width)
        self.shared = nn.Linear(width, width) if random.random() < 0.5 else None
        self.exchanges = random.random() < 0.8

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of tokens by width."""
        gates, chosen = self.router(x).softmax(-1).topk(TOPS, -1)
        flat = chosen.flatten()
        counts = torch.zeros(RANKS, dtype=torch.long).scatter_add(0, flat, torch.ones_like(flat))
        arriving = counts
        if self.exchanges:
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts)
        sent, received = counts.tolist(), arriving.tolist()
        order = torch.argsort(flat)
        rows = all_to_all_single_autograd(x[order // TOPS], received, sent, dist.group.WORLD)
        back = all_to_all_single_autograd(torch.relu(self.expert(rows)), sent, received, dist.group.WORLD)
        mixed = torch.zeros_like(x).index_add(0, order // TOPS, back * gates.flatten()[order, None])
        return x + mixed if self.shared is None else x + mixed + self.shared(x)


class Branching(nn.Module):
    """More is done where a value says so."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)
        self.reduces = random.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of tokens by width."""
        largest = x.detach().abs().amax()
        if self.reduces:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        x = self.body(x)
        return x + self.body(x) if largest.item() > 1 else x


class Masked(nn.Module):
    """Work on the rows that a mask finds."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of tokens by width."""
        rows = torch.nonzero(x.detach()[:, 0] > 0)[:, 0]
        return x.index_add(0, rows, self.body(x[rows]))


class Gathered(nn.Module):
    """A weight that is gathered by hand, a metric that is reduced and never read."""

    def __init__(self, width: int, random: Random) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.randn(width // RANKS, width))
        self.measures = random.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of tokens by width."""
        if self.measures:
            dist.all_reduce(x.detach().square().mean())
        return x + torch.tanh(x @ _gather(self.shard, 0, dist.group.WORLD))


class Waiting(nn.Module):
    """The host waits for the device, as where a step is timed by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of anything."""
        torch.cuda.synchronize()
        return x


BLOCKS: Final[tuple[Callable[[int, Random], nn.Module], ...]] = (
    Dense,
    Dense,
    Routed,
    Routed,
    Branching,
    Masked,
    Gathered,
)


class Optimizer(torch.optim.SGD):
    """Perhaps unscales and skips, clips, then steps, then averages the parameters."""

    def __init__(self, model: nn.Module, random: Random) -> None:
        self.held = list(model.parameters())
        is_sharded = any(isinstance(one, dist.tensor.DTensor) for one in self.held)
        self.unscales = random.random() < 0.4
        self.clips = random.random() < 0.5
        self.averages = random.random() < 0.4 and not is_sharded
        self.reduces_norm = not is_sharded and random.random() < 0.5
        super().__init__(self.held, lr=0.1, foreach=random.random() < 0.5, momentum=random.choice((0.0, 0.9)))
        self.average = [one.detach().clone() for one in self.held] if self.averages else []

    def step(self, closure: Any = None) -> Any:
        """One update."""
        gradients = [one.grad for one in self.held if one.grad is not None]
        if self.unscales:
            torch._foreach_mul_(gradients, 1 / 1024)
            if not torch.stack([local(one).isfinite().all() for one in gradients]).all().item():
                return None
        if self.clips and self.reduces_norm:
            square = torch.stack([one.square().sum() for one in gradients]).sum()
            dist.all_reduce(square)
            torch._foreach_mul_(gradients, (1 / (square.sqrt() + 1e-6)).clamp(max=1.0))
        elif self.clips:
            nn.utils.clip_grad_norm_(self.held, 1.0)
        super().step(closure)
        if self.averages:
            torch._foreach_lerp_(self.average, [one.detach() for one in self.held], 0.01)
        return None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor


@dataclass(frozen=True)
class Drawn:
    """What a seed's step is made of."""

    blocks: tuple[Callable[[int, Random], nn.Module], ...]
    width: int
    way: str
    micro_batches: int
    seed: int
    waits: bool

    @property
    def words(self) -> str:
        """One line."""
        names = ", ".join([*(block.__name__ for block in self.blocks), *(["Waiting"] if self.waits else [])])
        return f"{names}; {self.way}; width {self.width}; {self.micro_batches} micro-batches"


def drawn(seed: int) -> Drawn:
    """The step of a seed."""
    random = Random(seed)
    blocks = tuple(random.choice(BLOCKS) for _ in range(random.randint(1, 3)))
    way = random.choice(("alone", "DDP", "FSDP2"))
    width, micro_batches = random.choice(WIDTHS), 1 if way == "DDP" else random.choice((1, 1, 2))
    return Drawn(blocks, width, way, micro_batches, seed, waits=Random(seed + 4).random() < WAITING)


def built(what: Drawn, read: Callable[[torch.Tensor], float]) -> TrainingStep:
    """The step in the world of a capture."""
    random = Random(what.seed + 1)
    blocks = [block(what.width, random) for block in what.blocks]
    if what.waits:
        blocks.insert(1, Waiting())
    model: nn.Module = nn.Sequential(*blocks)
    if what.way == "FSDP2":
        for block in (*model.children(), model):
            if not isinstance(block, Waiting):
                fully_shard(block)
    elif what.way == "DDP":
        views = random.random() < 0.5
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1, gradient_as_bucket_view=views)
    return TrainingStep(
        model=model,
        inputs=(torch.randn(TOKENS, what.width),),
        loss=lambda out: out.float().square().mean(),
        optimizers=(Optimizer(model, random),),
        num_micro_batches=what.micro_batches,
        read_value=read,
    )


# The oracle.


@dataclass
class Seen:
    """One dispatched operator, or a value that the host read: storages (and which of their lives) read and written."""

    name: str | None
    reads: set[tuple[int, int]]
    writes: set[tuple[int, int]]
    draws: bool = False
    is_read: bool = False


_IN_PLACE: Final = ("allreduce_", "broadcast_")
_INTO: Final = ("alltoall_base_", "_allgather_base_", "_reduce_scatter_base_")
_VIEWS: Final = ("_unsafe_view", "detach", "alias", "lift_fresh", "_reshape_alias")
_WAIT: Final = "_c10d_functional::wait_tensor"


@dataclass
class Log:
    """Everything that was dispatched, in order."""

    seen: list[Seen] = field(default_factory=list)
    _lives: Counter[int] = field(default_factory=Counter)
    _same: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    _known: dict[int, StorageWeakRef] = field(default_factory=dict)  # while it is held, no address comes twice

    def storages(self, value: object) -> set[tuple[int, int]]:
        """The storages of all tensors in a value, waits seen through."""
        found = set()
        for leaf in torch.utils._pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._known.setdefault(storage._cdata, StorageWeakRef(storage))
                key = (storage._cdata, self._lives[storage._cdata])
                found.add(self._same.get(key, key))
        return found

    def freed(self, storage: torch.UntypedStorage) -> None:
        """A storage begins another life."""
        self._known.setdefault(storage._cdata, StorageWeakRef(storage))
        self._lives[storage._cdata] += 1

    def read(self, tensor: torch.Tensor) -> None:
        """The host read a value of it."""
        self.seen.append(Seen(None, self.storages(tensor), set(), is_read=True))

    def wait(self) -> None:
        """The host waited for all that was issued."""
        self.seen.append(Seen(None, {one for seen in self.seen for one in seen.writes}, set(), is_read=True))

    def take(self, func: Any, args: Any, kwargs: Any, result: object, name: str | None) -> None:
        """An operator; what it was called by the recorder."""
        schema, short = func._schema, func._schema.name.rpartition("::")[2]
        reads, made = self.storages((args, kwargs)), self.storages(result)
        if schema.name == _WAIT:
            (whole,) = reads
            self._same |= dict.fromkeys(made - reads, whole)
            return
        if func.is_view or short in _VIEWS:
            return
        if short in _IN_PLACE:
            writes = self.storages(args[0])
        elif short in _INTO:
            writes = self.storages(args[0])
            reads = self.storages(args[1])
        else:
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
            mutated = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            writes = made | self.storages([given[key] for key in mutated if key in given])
        self.seen.append(Seen(name, reads, writes, torch.Tag.nondeterministic_seeded in func.tags))

    def pairs(self) -> Iterator[tuple[str, str, bool]]:
        """(earlier, later, whether that is for a read of the host alone) of all that depends on each other directly."""
        named = [one for one in self.seen if one.name is not None]
        for number, later in enumerate(named):
            for earlier in named[:number]:
                clash = earlier.writes & (later.reads | later.writes) or earlier.reads & later.writes
                if (clash or (earlier.draws and later.draws)) and earlier.name != later.name:
                    yield str(earlier.name), str(later.name), False
        for place, read in enumerate(self.seen):
            if not read.is_read:
                continue
            makers = {str(one.name) for one in self.seen[:place] if one.name and one.writes & read.reads}
            yield from (
                (maker, str(later.name), True)
                for maker in sorted(makers)
                for later in self.seen[place:]
                if later.name is not None and later.name != maker
            )


@contextmanager
def watched(log: Log) -> Iterator[None]:
    """All that the recorder is told is noted."""
    record, resized, synchronize = StepRecorder.record, StorageTable.resized, fake_tensor._Clock.synchronize

    def waited(self: fake_tensor._Clock, stream: str | None) -> None:
        synchronize(self, stream)
        if stream is None:
            log.wait()

    def taken(self: StepRecorder, func: Any, args: Any, kwargs: Any, result: object, **more: Any) -> str | None:
        name = record(self, func, args, kwargs, result, **more)
        log.take(func, args, kwargs, result, name)
        return name

    def freed(self: StorageTable, storage: torch.UntypedStorage) -> None:
        resized(self, storage)
        log.freed(storage)

    StepRecorder.record, StorageTable.resized = taken, freed  # type: ignore[method-assign]  # undone below
    fake_tensor._Clock.synchronize = waited  # type: ignore[method-assign]  # as above
    try:
        yield
    finally:
        StepRecorder.record, StorageTable.resized = record, resized  # type: ignore[method-assign]
        fake_tensor._Clock.synchronize = synchronize  # type: ignore[method-assign]


def captured(what: Drawn) -> tuple[IssuedStep, Log]:
    """The captured step, and what the oracle saw of it."""
    log, values = Log(), Random(what.seed + 2)

    def read(tensor: torch.Tensor) -> float:
        log.read(tensor)
        return (
            values.choice((0, 3))
            if tensor.is_floating_point() or tensor.dtype == torch.bool
            else TOKENS * TOPS // RANKS
        )

    torch.manual_seed(0)
    with watched(log):
        return capture_step(partial(built, what, read), num_ranks=RANKS, name=f"seed-{what.seed}"), log


# Plans.


def problem_of(capture: IssuedStep) -> PlanProblem:
    """The capture on two nodes of two GPUs."""
    cluster = replace(load_preset("a40_pcie", 2), gpus_per_node=RANKS // 2)
    placed = capture.placed_on(cluster)
    return PlanProblem(
        iteration=placed.iteration,
        cluster=cluster,
        times=ModelTimes(ContentionModel(cluster, load_profile("plausible"))),
        groups=placed.groups,
        work=SearchBudget(WORK),
        issued=replace(placed.issued, is_dataflow=True),
        framework=framework_of(placed.iteration),
    )


def parts_of(plan: Plan, known: Sequence[str]) -> dict[str, list[str]]:
    """Each operator's parts in the plan: itself, its pieces, what it was fused into."""
    names = dict.fromkeys(known)
    members = {f"{step.comms[0]}+{len(step.comms) - 1}": step.comms for step in plan.rewrites if isinstance(step, Fuse)}

    def wholes(name: str) -> set[str]:
        inside = members.get(name)
        return {origin_name(name, names)} if inside is None else {one for part in inside for one in wholes(part)}

    found: dict[str, list[str]] = {}
    for op in plan.iteration.ops:
        for whole in wholes(op.name):
            found.setdefault(whole, []).append(op.name)
    return found


def finds_of_plan(problem: PlanProblem, plan: Plan, pairs: Sequence[tuple[str, str, bool]]) -> Iterator[str]:
    """Pairs that a plan does not keep, and reductions that an optimizer does not wait for."""
    spans = {span.name: span for span in simulated(problem, plan.iteration, plan.configs).timeline.spans}
    parts = parts_of(plan, [op.name for op in problem.iteration.ops])
    place = {op.name: number for number, op in enumerate(plan.iteration.ops)}
    ahead = (
        {name for visit in visits_of(problem.iteration) for name in visit.chain} if plan.planner == "fsdp2" else set()
    )
    for earlier, later, is_read in pairs:
        if is_read and later in ahead:
            continue  # FSDP2's hooks gather ahead of a read
        # A copy that joins pieces is a plan's own: what the host reads or waits for is there when the pieces end.
        made = [name for name in parts.get(earlier, ()) if not (is_read and name == f"{earlier}#join")]
        if made and later in parts and not _keeps(made, parts[later], spans, place):
            yield f"{later!r} does not wait for {earlier!r}{' (read by the host)' if is_read else ''}"
    if problem.framework is not None:
        kinds = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)
        reduced = [
            c.name for c in problem.iteration.comms if c.collective.kind in kinds and c.origin.phase in _BACKWARD
        ]
        updates = [op.name for op in problem.iteration.computations if op.origin.phase is Phase.OPTIMIZER]
        ends = [spans[part].end_s for name in reduced for part in parts.get(name, ())]
        starts = [spans[part].start_s for name in updates for part in parts[name]]
        if ends and starts and max(ends) > min(starts) + 1e-12:
            yield f"{problem.framework}'s optimizer starts before every gradient is reduced"


_BACKWARD: Final = (Phase.BACKWARD, Phase.WEIGHT_GRAD)


def _keeps(earlier: Sequence[str], later: Sequence[str], spans: dict[str, Span], place: dict[str, int]) -> bool:
    """The later one starts when the earlier one has ended, and is issued behind it; of pieces the first ones."""
    ended, started = [spans[name].end_s for name in earlier], [spans[name].start_s for name in later]
    if len(earlier) == 1 or len(later) == 1:
        return max(ended) <= min(started) + 1e-12 and max(map(place.__getitem__, earlier)) < min(
            map(place.__getitem__, later)
        )
    return min(ended) <= min(started) + 1e-12


def finds_of(seed: int, *, num_others: int = OTHERS) -> tuple[int, list[str]]:
    """Plans that were checked, and what is wrong with them."""
    capture, log = captured(drawn(seed))
    problem = problem_of(capture)
    pairs = sorted(set(log.pairs()))
    known = {op.name for op in problem.iteration.ops}
    finds = [f"capture: {name!r} is no operator" for pair in pairs for name in pair[:2] if name not in known]
    issued = Plan(planner="as issued", rewrites=(), iteration=problem.unplanned, lower_bound_s=0.0)
    finds += [f"as issued: {find}" for find in finds_of_plan(problem, issued, pairs)]
    planners = ["ours", *Random(seed + 3).sample(PLANNERS, num_others)]
    if problem.framework == FSDP2:
        planners.append("fsdp2")
    for name in planners:
        try:
            plan = make_planner(name, {}).plan(problem)
            finds += [f"{name}: {find}" for find in finds_of_plan(problem, plan, pairs)]
        except Exception:
            finds.append(f"{name}: {traceback.format_exc(limit=-3)}")
    return len(planners) + 1, finds


def run(arguments: argparse.Namespace) -> int:
    """So many programs."""
    num_plans = num_finds = 0
    ways: Counter[str] = Counter()
    for seed in range(arguments.first, arguments.first + arguments.programs):
        try:
            checked, finds = finds_of(seed)
        except Exception:
            checked, finds = 0, [traceback.format_exc(limit=-4)]
        num_plans += checked
        num_finds += len(finds)
        ways[drawn(seed).way] += 1
        for find in finds[:3]:
            print(f"seed {seed} ({drawn(seed).words}): {find}", flush=True)
        if not (seed + 1) % 50:
            print(
                f"up to seed {seed}: {dict(ways)}, {num_plans} orders, {num_finds} finds", file=sys.stderr, flush=True
            )
    last = arguments.first + arguments.programs - 1
    print(f"seeds {arguments.first} to {last}: {dict(ways)}, {num_plans} orders, {num_finds} finds", flush=True)
    return int(num_finds > 0)


# The default planner against the others.


def built_problem(seed: int) -> tuple[str, PlanProblem]:
    """A decoder's step in a layout, on two nodes, and what it is in words."""
    random = Random(seed)
    hidden = random.choice((1024, 2048, 4096))
    unit, num_layers = random.choice(((Unit.LAYER, 2), (Unit.MATRIX, 1)))
    model = TransformerModel(
        name="drawn",
        num_layers=num_layers,
        hidden=hidden,
        ffn=4 * hidden,
        num_heads=16,
        num_kv_heads=16,
        head_dim=hidden // 16,
        vocab=4096,
        gated=random.random() < 0.5,
        **({"num_experts": 16, "experts_per_token": 2} if random.random() < 0.3 else {}),  # type: ignore[arg-type]
    )
    preset = random.choice(("a100_hdr1", "h100_dgx"))
    tensor = random.choice((1, 2, 8))
    data, micro_batches = 16 // tensor, random.choice((1, 2))
    layout = ParallelLayout(
        tensor=tensor,
        data=data,
        sequence_parallel=tensor > 1 and random.random() < 0.5,
        zero_stage=random.choice((0, 3)),
        expert=min(8, data) if model.num_experts > 1 else 1,
        global_batch=data * micro_batches,
    )
    cluster = load_preset(preset, 2)
    seq_len = random.choice((512, 2048))
    step = program_step(model, layout, seq_len=seq_len, gpus_per_node=8, unit=unit)
    times = ModelTimes(ContentionModel(cluster, load_profile("plausible")))
    words = f"{preset}, tensor {tensor}, data {data}, ZeRO {layout.zero_stage}, {seq_len} tokens, width {hidden}"
    return words, PlanProblem(iteration=step, cluster=cluster, times=times)


def behind(
    seed: int, *, work: float = PROPERTY_WORK, planners: Sequence[str] = PLANNERS
) -> tuple[str, int, dict[str, float]]:
    """A step in words, its operators; by planner how much longer the default's plan takes (below 0: shorter)."""
    if seed % 2:
        words, problem = built_problem(seed)
    else:
        what = replace(drawn(seed), micro_batches=1, blocks=drawn(seed).blocks[:2])
        words, problem = what.words, problem_of(captured(what)[0])
    problem = replace(problem, work=SearchBudget(work * len(problem.iteration.ops)))
    plan = make_planner("ours", {}).plan(problem)
    own_s = simulated(problem, plan.iteration, plan.configs).makespan_s
    found = {}
    for name in planners:
        try:
            other = make_planner(name, {}).plan(problem)
        except JobError:  # its rules are for another kind of step
            continue
        found[name] = own_s / simulated(problem, other.iteration, other.configs).makespan_s - 1
    return words, len(problem.iteration.ops), found


def compare(arguments: argparse.Namespace) -> int:
    """So many programs with every planner."""
    worst: dict[str, float] = {}
    gains: dict[str, list[float]] = {}
    num_behind = 0
    for seed in range(arguments.first, arguments.first + arguments.programs):
        words, num_ops, found = behind(seed, work=arguments.work)
        late = {name: share for name, share in found.items() if share > BEHIND}
        num_behind += bool(late)
        for name, share in late.items():
            print(f"seed {seed} ({words}; {num_ops} operators): {share:.2%} behind {name}", flush=True)
        for name, share in found.items():
            worst[name] = max(worst.get(name, -1.0), share)
            gains.setdefault(name, []).append(-share)
        if not (seed + 1) % 20:
            print(f"up to seed {seed}: {num_behind} behind", file=sys.stderr, flush=True)
    for name in sorted(worst):
        mean = sum(gains[name]) / len(gains[name])
        print(f"{name}: {len(gains[name])} steps, at worst {worst[name]:+.3%}, in the mean {mean:.1%} shorter")
    print(f"{arguments.programs} steps, {num_behind} with a planner that is more than {BEHIND:.1%} ahead")
    return int(num_behind > 0)


def show(arguments: argparse.Namespace) -> int:
    """One program."""
    print(drawn(arguments.seed).words)
    capture, _ = captured(drawn(arguments.seed))
    reads = sum(op.is_host_read for op in capture.iteration.computations)
    print(f"{len(capture.iteration.ops)} operators, {len(capture.iteration.comms)} collectives, {reads} reads")
    print(*finds_of(arguments.seed, num_others=len(PLANNERS))[1], sep="\n")
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    running = verbs.add_parser("run")
    running.add_argument("--first", type=int, default=0)
    running.add_argument("--programs", type=int, default=100)
    running.set_defaults(verb=run)
    comparing = verbs.add_parser("behind")
    comparing.add_argument("--first", type=int, default=0)
    comparing.add_argument("--programs", type=int, default=100)
    comparing.add_argument("--work", type=float, default=PROPERTY_WORK, help="millions of steps per operator")
    comparing.set_defaults(verb=compare)
    showing = verbs.add_parser("show")
    showing.add_argument("seed", type=int)
    showing.set_defaults(verb=show)
    arguments = parser.parse_args()
    return int(arguments.verb(arguments))


if __name__ == "__main__":
    sys.exit(main())
