"""plan.toml: a plan to read, edit and apply. It says which graph and world it is for; another one is refused.

Format: docs/formats_plan.md.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import tomli_w
from msgspec import Meta

from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.planners.framework_waits import FSDP2, framework_of
from lagom_overlap.planners.megatron.settings import MegatronSettings
from lagom_overlap.planners.schedule import lower_bound, task_graph
from lagom_overlap.record import read_regular
from lagom_overlap.toml_tables import parse_toml
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.fsdp2.visits import units_of, visits_of
from lagom_overlap.workload.iteration import graph_digest
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Rewrite
from lagom_overlap.workload.rewrite.tables import RewriteTable, rewrite_of, table_of

VERSION: Final = 2
"""Of the file's format; a plan of another version is refused."""
MAX_PLAN_BYTES: Final = 64 << 20
"""A plan of 100,000 operators is about 10 MB."""

_GRAPH_HEAD: Final = """\
# A plan of `lagom plan`. It may be edited: rewrites are applied from the top, names are those of the operators
# (o#0 is a piece of o, c/g0 the step of c over axis 0 of its mesh, c.rs and c.ag what c was replaced by, c+1 a fusion).
# The last table orders all operators: an operator may move as long as it stays behind what it needs.
# Apply it: lagom plan JOB --apply plan.toml
"""
_FSDP2_HEAD: Final = """\
# A plan of `lagom plan` for FSDP2. It may be edited.
# Apply it in the job: lagom_overlap.apply_fsdp2(model, Path("plan.toml")), after fully_shard.
# Predict it: lagom plan JOB --apply plan.toml
"""
_MEGATRON_HEAD: Final = """\
# A plan of `lagom plan` for Megatron-LM: keys of the job's [parallel]. It may be edited.
# Apply it in the job: megatron_args.sh sets the switches and the environment, tp_comm_overlap.yaml is for them.
# Predict it: lagom plan JOB --apply plan.toml
"""


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    planner: str
    graph: str
    num_ranks: Annotated[int, Meta(ge=1)]
    carrier: Carrier | None = None
    job: str = ""
    times: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plan: _Head
    rewrite: tuple[RewriteTable, ...] = ()
    fsdp2: Fsdp2Settings | None = None
    megatron: MegatronSettings | None = None


def plan_toml(
    job: str, plan: Plan, iteration: Iteration, num_ranks: int, *, carrier: Carrier | None, times: str = ""
) -> bytes:
    """The file of a plan made for `iteration`; `times` says where its times came from."""
    if plan.settings is None:
        return rewrites_toml(
            job, plan.rewrites, iteration, num_ranks, planner=plan.planner, carrier=carrier, times=times
        )
    head = _Head(VERSION, plan.planner, graph_digest(iteration), num_ranks, carrier, job, times)
    is_fsdp2 = isinstance(plan.settings, Fsdp2Settings)
    tables = {"plan": _without_nulls(head), "fsdp2" if is_fsdp2 else "megatron": _without_nulls(plan.settings)}
    return ((_FSDP2_HEAD if is_fsdp2 else _MEGATRON_HEAD) + tomli_w.dumps(tables)).encode()


def rewrites_toml(
    job: str,
    rewrites: Sequence[Rewrite],
    iteration: Iteration,
    num_ranks: int,
    *,
    planner: str,
    carrier: Carrier | None,
    times: str = "",
) -> bytes:
    """The file of rewrites that somebody found for `iteration`."""
    head = _Head(VERSION, planner, graph_digest(iteration), num_ranks, carrier, job, times)
    tables = [msgspec.to_builtins(table_of(step)) for step in rewrites]
    return (_GRAPH_HEAD + tomli_w.dumps({"plan": _without_nulls(head), "rewrite": tables})).encode()


def _without_nulls(head: _Head | Fsdp2Settings | MegatronSettings) -> dict[str, object]:
    """TOML has none."""
    return {key: value for key, value in msgspec.to_builtins(head).items() if value is not None}


def check_plan_file(path: Path) -> Carrier | None:
    """Refuses what is no plan of any graph; whom the plan is for.

    Raises:
        JobError: if the file is missing, no plan, or of another version.
    """
    return _decoded(path).plan.carrier


def read_fsdp2_settings(path: Path, num_ranks: int) -> Fsdp2Settings:
    """The settings of a plan for FSDP2.

    Raises:
        JobError: if the file is no plan, for another carrier or number of ranks.
    """
    settings, found_with = fsdp2_plan(path)
    _check_ranks(path, found_with, num_ranks)
    return settings


def fsdp2_plan(path: Path) -> tuple[Fsdp2Settings, int]:
    """The settings of a plan for FSDP2, and the number of ranks that it is for.

    Raises:
        JobError: if the file is no plan, or for another carrier.
    """
    file = _decoded(path)
    if file.fsdp2 is None:
        raise JobError(f"plan {str(path)!r} is for {file.plan.carrier or 'no framework'}, not for fsdp2")
    return file.fsdp2, file.plan.num_ranks


def check_plan(path: Path, iteration: Iteration, num_ranks: int) -> None:
    """Refuses a plan that cannot be applied to a step, whatever its operators take.

    Raises:
        JobError: as `read_plan`.
    """
    _applied(path, _decoded(path), iteration, num_ranks)


def read_plan(path: Path, problem: PlanProblem, num_ranks: int) -> Plan:
    """The plan of a file, for a problem.

    Raises:
        JobError: if the file is missing or no plan, is for another graph or number of ranks, or does what is not legal.
    """
    file = _decoded(path)
    rewrites, iteration = _applied(path, file, problem.iteration, num_ranks)
    if file.fsdp2 is not None:
        iteration = problem.with_settings(file.fsdp2)
    if file.megatron is not None or (file.fsdp2 is not None and problem.whole is not None):
        bound_s = None  # of a whole iteration there is none
    else:
        graph = task_graph(problem)
        bound_s = graph.seconds(lower_bound(graph))
    return Plan(
        planner=file.plan.planner,
        rewrites=rewrites,
        iteration=iteration,
        lower_bound_s=bound_s,
        settings=file.fsdp2 or file.megatron,
    )


def read_rewrites(path: Path, iteration: Iteration, num_ranks: int, *, other_rows: bool = False) -> tuple[Rewrite, ...]:
    """The rewrites of a plan's file for a step, checked against it: what an engine applies.

    With `other_rows` the file may be for a graph of other sizes with the same operators: that of a rank which exchanges
    other numbers of rows.

    Raises:
        JobError: as `read_plan`.
    """
    file = _decoded(path)
    if file.plan.carrier not in (None, Carrier.PROGRAM, Carrier.INDUCTOR):
        raise JobError(f"plan {str(path)!r} is for {file.plan.carrier}, which takes settings: it rewrites no graph")
    return _applied(path, file, iteration, num_ranks, other_rows=other_rows)[0]


def _check_ranks(path: Path, made_for: int, num_ranks: int) -> None:
    if made_for != num_ranks:
        raise JobError(f"plan {str(path)!r} is for {made_for} ranks, this job has {num_ranks}")


def _difference(file: _File, iteration: Iteration) -> str:
    """Where the graph that a plan was made for and a step differ, as far as the plan tells."""
    if file.fsdp2 is not None and framework_of(iteration) != FSDP2:
        return f"a step that FSDP2 issues, this job's {iteration.name!r} is none"
    if file.fsdp2 is not None and (others := set(file.fsdp2.units) ^ set(units := units_of(visits_of(iteration)))):
        return f"of {len(file.fsdp2.units)} units, this job's has {len(units)}; {min(others)!r} is in one of them only"
    try:
        rewritten(iteration, [rewrite_of(table) for table in file.rewrite])
    except JobError as error:
        return str(error).removeprefix("a plan for another graph: ")
    size = f"graph {file.plan.graph}, this job's is {graph_digest(iteration)}"
    return f"all that it names is there, but sizes, other operators or data flow differ ({size})"


def _applied(
    path: Path, file: _File, iteration: Iteration, num_ranks: int, *, other_rows: bool = False
) -> tuple[tuple[Rewrite, ...], Iteration]:
    """The rewrites, and what they make of the step."""
    _check_ranks(path, file.plan.num_ranks, num_ranks)
    digest = graph_digest(iteration)
    if file.plan.graph != digest and not other_rows:
        raise JobError(f"plan {str(path)!r} is for another graph: {_difference(file, iteration)}")
    if file.fsdp2 is not None and file.fsdp2.units != (units := units_of(visits_of(iteration))):
        raise JobError(
            f"plan {str(path)!r}: fsdp2.units are {', '.join(file.fsdp2.units)}; the step's are {', '.join(units)}"
        )
    rewrites: tuple[Rewrite, ...] = tuple(rewrite_of(table) for table in file.rewrite)
    try:
        return rewrites, rewritten(iteration, rewrites)
    except JobError as error:
        raise JobError(f"plan {str(path)!r}: {error}") from None


def _decoded(path: Path) -> _File:
    try:
        content = read_regular(path, MAX_PLAN_BYTES)
    except FileNotFoundError:
        raise JobError(f"plan {str(path)!r} does not exist") from None
    except OSError as error:
        raise JobError(f"plan {str(path)!r} cannot be read: {error.strerror}") from None
    try:
        file = msgspec.convert(parse_toml(content), _File)
    except UnicodeDecodeError as error:
        raise JobError(f"plan {str(path)!r} is not UTF-8 text (byte {error.start})") from None
    except (msgspec.ValidationError, ValueError) as error:
        raise JobError(f"plan {str(path)!r} is no plan: {str(error).replace('`', '')}") from None
    if file.plan.version != VERSION:
        raise JobError(f"plan {str(path)!r} has version {file.plan.version}; this lagom reads version {VERSION}")
    return file
