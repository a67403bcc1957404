"""Concerto's other grids on steps that we captured: DAP, ZeRO-3, ZeRO-2, and shardings found by search (its Alpa rows).

The paper states a mean and a largest time saved for each grid. Its batches are not printed: 16 images per GPU here, GPT
of 0.9 B with 2 sequences of 2048 tokens per GPU. ZeRO-2 and the searched shardings come from a step traced on one
device, with the collectives inserted by `planners.sharding_search`. ZeRO-3 is FSDP2's captured step: it is judged with
contention against FSDP2's own order. What Alpa runs is taken to be the step in
program order on one stream, as XLA's collectives of its time were not asynchronous; a second column has them overlap
computation.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lagom_overlap.capturing.models.degrees import Degrees
from lagom_overlap.capturing.models.named import capture_named, decoder_step, named_step
from lagom_overlap.capturing.tensor_program import capture_program
from lagom_overlap.hardware import Cluster, load_preset
from lagom_overlap.planners.base import Planner, PlanProblem
from lagom_overlap.planners.baselines import ProgramOrder
from lagom_overlap.planners.concerto.planner import Concerto
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.framework_waits import framework_of
from lagom_overlap.planners.megatron import baselines
from lagom_overlap.planners.predict import predict
from lagom_overlap.planners.schedule import ScheduleOverlap
from lagom_overlap.planners.sharding_search.emit import emit
from lagom_overlap.planners.sharding_search.integer_program import FoundSharding
from lagom_overlap.planners.sharding_search.mesh_layouts import SearchMesh
from lagom_overlap.planners.sharding_search.search import search_sharding
from lagom_overlap.planners.simulated import simulated
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.tensor_program import TensorProgram
from plan_papers.concerto_tables import A800_NETWORK, A800_NVLINK, gpt
from plan_papers.grid import SEQ_LEN
from plan_papers.judged import predicted, table, times_of, verdict

IMAGES, SEQUENCES = 16, 2
"""Per GPU."""
SEARCH_S = 60.0
GPT = "gpt-0.9b"
STAGE_2 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A captured step, and how the framework that Concerto was compared with issues it."""

    model: str
    parallel: str
    capture: IssuedStep
    baseline: Planner
    note: Sequence[str] = ()


def rig(num_gpus: int) -> Cluster:
    """The paper's nodes of eight A800."""
    nodes = -(-num_gpus // 8)
    return replace(load_preset("a100_dgx", nodes), name="a800", intra=A800_NVLINK, inter=A800_NETWORK)


def program_of(model: str, num_gpus: int) -> TensorProgram:
    """The training step of the whole batch on one device."""
    if model == GPT:
        shape = gpt(GPT, 2048, 16)
        build = lambda: decoder_step(  # noqa: E731  built in a fake world
            shape, Degrees(), micro_batch=SEQUENCES * num_gpus, seq_len=SEQ_LEN
        )
    else:
        build = named_step(model, Degrees(), micro_batch=IMAGES * num_gpus, seq_len=1)
    return capture_program(build, name=model).program.with_updates()


def ablation(cell: Cell, work: SearchBudget) -> tuple[list[str], ScheduleOverlap, float]:
    """Operators, the step before, its share of communication, and what S, AD and fusion save of it; the last saving.

    A framework's own step is judged with contention, the others as their planners see them.
    """
    step = cell.capture.iteration
    cluster = rig(cell.capture.num_ranks)
    placed = cell.capture.placed_on(cluster)
    problem = PlanProblem(
        iteration=placed.iteration,
        cluster=cluster,
        times=times_of(cluster),
        groups=cell.capture.groups,
        work=work,
        issued=replace(placed.issued, is_dataflow=True),
        framework=framework_of(placed.iteration),
    )
    before = predicted(problem, cell.baseline).overlap
    planners = (Concerto(decompose=False, fuse=False), Concerto(fuse=False), Concerto())
    plans = [planner.plan(problem).iteration for planner in (cell.baseline, *planners)]
    if problem.framework is None:
        before_s, *after = [predict(problem, plan).overlap.makespan_s for plan in plans]
    else:
        before_s, *after = [simulated(problem, plan).makespan_s for plan in plans]
    share = before.communication_s / (before.communication_s + before.computation_s)
    saved = [1 - makespan_s / before_s for makespan_s in after]
    row = [str(len(step.ops)), f"{before_s * 1e3:.1f}", f"{share:.2f}", *(f"{gain:.1%}" for gain in saved)]
    print(cell.model, cell.parallel, row, file=sys.stderr, flush=True)
    return row, before, saved[-1]


_ABLATION = ("operators", "before, ms", "share of communication", "S", "S + AD", "S + AD + fusion")


def grid(title: str, cells: Iterator[Cell], stated: tuple[float, float], work: SearchBudget) -> Iterator[str]:
    """One grid's rows, and its mean and largest saving next to the paper's."""
    yield f"## Concerto: {title}; time saved on A800 (NVLink)"
    yield ""
    rows, gains = [], []
    for cell in cells:
        row, _, gain = ablation(cell, work)
        rows.append([cell.model, cell.parallel, *row])
        gains.append(gain)
    yield from table(("model", "parallel", *_ABLATION), rows)
    yield from summary(gains, stated)


def summary(gains: Sequence[float], stated: tuple[float, float]) -> Iterator[str]:
    """Mean and largest saving."""
    mean, most = sum(gains) / len(gains), max(gains)
    yield from table(
        ("time saved", "paper", "here", "verdict"),
        [
            ["mean", f"{stated[0]:.1%}", f"{mean:.1%}", verdict(mean, stated[0])],
            ["largest", f"{stated[1]:.1%}", f"{most:.1%}", verdict(most, stated[1])],
        ],
    )


def _named(cases: Sequence[tuple[str, str, int]], baseline: Callable[[], Planner], length: int) -> Iterator[Cell]:
    for model, degree, ranks in cases:
        batch = IMAGES if degree == "fsdp" else 1
        capture = capture_named(model, {degree: ranks}, micro_batch=batch, seq_len=length)
        yield Cell(model=model, parallel=f"{degree} {ranks}", capture=capture, baseline=baseline())


def _zero_2() -> Iterator[Cell]:
    for model in ("vit-l-14", "wide-resnet-50-2", GPT):
        for ranks in (8, 16):
            cluster = rig(ranks)
            found = search_sharding(
                program_of(model, ranks),
                mesh_shape=(ranks,),
                cluster=cluster,
                times=times_of(cluster),
                zero_stage=STAGE_2,
                limit_s=SEARCH_S,
            )
            capture = emit(found, name=f"{model}-zero2")
            yield Cell(model=model, parallel=f"ZeRO-2 {ranks}", capture=capture, baseline=baselines.zero2())


def dap(work: SearchBudget) -> Iterator[str]:
    """Dynamic axial parallelism; the paper's means on two links are 12.5 and 15.6 %."""
    cells = _named([("evoformer", "axial", 2), ("evoformer", "axial", 4)], ProgramOrder, 256)
    yield from grid("DAP, captured, before: program order", cells, (0.14, 0.197), work)


def zero_3(work: SearchBudget) -> Iterator[str]:
    """FSDP2 as captured, against its own order, with contention."""
    cases = [(model, "fsdp", ranks) for model in ("vit-l-14", "wide-resnet-50-2") for ranks in (8, 16)]
    cells = _named(cases, ProgramOrder, 1)
    yield from grid("ZeRO-3, captured, with contention, before: FSDP2's own order", cells, (0.151, 0.332), work)


def zero_2(work: SearchBudget) -> Iterator[str]:
    """Parameters whole, optimizer shared out."""
    yield from grid("ZeRO-2, collectives inserted, before: DeepSpeed's", _zero_2(), (0.191, 0.429), work)


def searched(work: SearchBudget) -> Iterator[str]:
    """Shardings found by search."""
    yield "## Concerto: shardings found by search (Alpa's rows) on A800 (NVLink)"
    yield ""
    rows, found_rows, in_order, overlapped = [], [], [], []
    for model, shape in (
        ("vit-l-14", (8,)),
        ("vit-l-14", (16,)),
        ("wide-resnet-50-2", (8,)),
        ("wide-resnet-50-2", (16,)),
        (GPT, (8,)),
        (GPT, (16,)),
    ):
        mesh = SearchMesh(shape)
        started = time.perf_counter()
        sharding = _searched(program_of(model, mesh.num_ranks), mesh)
        seconds = time.perf_counter() - started
        capture = emit(sharding, name=f"{model}-auto")
        words = "x".join(map(str, shape))
        cell = Cell(model=model, parallel=f"mesh {words}", capture=capture, baseline=ProgramOrder())
        row, before, gain = ablation(cell, work)
        serial_s = before.communication_s + before.computation_s
        saved = 1 - (1 - gain) * before.makespan_s / serial_s
        in_order.append(saved)
        overlapped.append(gain)
        rows.append([model, words, row[0], f"{serial_s * 1e3:.1f}", *row[1:], f"{saved:.1%}"])
        found_rows.append([model, words, *_what(sharding, capture), f"{seconds:.0f}"])
    yield from table(
        ("model", "mesh", "operators", "in order, ms", "overlapped, ms", *_ABLATION[2:], "saved of in order"), rows
    )
    yield "What was found (seconds with tracing, at the load above):"
    yield ""
    yield from table(("model", "mesh", "parameters cut", "collectives", "bytes", "proved", "seconds"), found_rows)
    yield "Against the step in order on one stream:"
    yield ""
    yield from summary(in_order, (0.111, 0.227))
    yield "Against the step with collectives overlapping computation:"
    yield ""
    yield from summary(overlapped, (0.111, 0.227))


def _searched(program: TensorProgram, mesh: SearchMesh) -> FoundSharding:
    cluster = rig(mesh.num_ranks)
    return search_sharding(
        program,
        mesh_shape=mesh.shape,
        cluster=cluster,
        times=times_of(cluster),
        memory_limit_bytes=cluster.gpu.memory_bytes,
        limit_s=SEARCH_S,
    )


def _what(sharding: FoundSharding, capture: IssuedStep) -> list[str]:
    options = [node.options[number] for node, number in zip(sharding.problem.nodes, sharding.choice, strict=True)]
    at_rest = [option.makes[0][1] for node, option in zip(sharding.problem.nodes, options, strict=True) if
               not node.calls and option.makes]  # fmt: skip
    cut = sum(any(isinstance(place, int) for place in layout) for layout in at_rest)
    comms = capture.iteration.comms
    kinds = {kind: sum(c.collective.kind == kind for c in comms) for kind in {c.collective.kind for c in comms}}
    return [
        f"{cut} of {len(at_rest)}",
        ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())),
        f"{sum(c.collective.num_bytes for c in comms) / 1e9:.2f} GB",
        "yes" if sharding.is_optimal else "no",
    ]
