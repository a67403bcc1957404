"""plan.toml: a plan to read, edit and apply. It says which graph and world it is for; another one is refused.

Format: docs/formats_plan.md.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import tomli_w
from msgspec import Meta

from lagom_overlap.errors import JobError
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.planners.schedule import lower_bound, task_graph
from lagom_overlap.workload import Iteration
from lagom_overlap.workload.digest import graph_digest
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Rewrite
from lagom_overlap.workload.rewrite.tables import RewriteTable, rewrite_of, table_of

VERSION: Final = 1
MAX_PLAN_BYTES: Final = 64 << 20
"""A plan of 100,000 operators is about 10 MB."""

_HEAD: Final = """\
# A plan of `lagom plan`. It may be edited: rewrites are applied from the top, names are those of the operators
# (o#0 is a piece of o, c/g0 the step of c over axis 0 of its mesh, c.rs and c.ag what c was replaced by, c+1 a fusion).
# The last table orders all operators: an operator may move as long as it stays behind what it needs.
# Apply it: lagom plan JOB --apply plan.toml
"""


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    planner: str
    graph: str
    num_ranks: Annotated[int, Meta(ge=1)]
    job: str = ""
    times: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    plan: _Head
    rewrite: tuple[RewriteTable, ...] = ()


def plan_toml(job: str, plan: Plan, iteration: Iteration, num_ranks: int, times: str = "") -> bytes:
    """The file of a plan made for `iteration`; `times` says where its times came from."""
    return rewrites_toml(job, plan.rewrites, iteration, num_ranks, planner=plan.planner, times=times)


def rewrites_toml(
    job: str, rewrites: Sequence[Rewrite], iteration: Iteration, num_ranks: int, *, planner: str, times: str = ""
) -> bytes:
    """The file of rewrites that somebody found for `iteration`."""
    head = _Head(VERSION, planner, graph_digest(iteration), num_ranks, job, times)
    tables = [msgspec.to_builtins(table_of(step)) for step in rewrites]
    return (_HEAD + tomli_w.dumps({"plan": msgspec.to_builtins(head), "rewrite": tables})).encode()


def check_plan_file(path: Path) -> None:
    """Refuses what is no plan of any graph.

    Raises:
        JobError: if the file is missing, no plan, or of another version.
    """
    _decoded(path)


def check_plan(path: Path, iteration: Iteration, num_ranks: int) -> None:
    """Refuses a plan that cannot be applied to a step, whatever its operators take.

    Raises:
        JobError: as `read_plan`.
    """
    _applied(path, iteration, num_ranks)


def read_plan(path: Path, problem: PlanProblem, num_ranks: int) -> Plan:
    """The plan of a file, for a problem.

    Raises:
        JobError: if the file is missing or no plan, is for another graph or number of ranks, or does what is not legal.
    """
    planner, rewrites, iteration = _applied(path, problem.iteration, num_ranks)
    graph = task_graph(problem)
    bound_s = graph.seconds(lower_bound(graph))
    return Plan(planner=planner, rewrites=rewrites, iteration=iteration, lower_bound_s=bound_s)


def read_rewrites(path: Path, iteration: Iteration, num_ranks: int, *, other_rows: bool = False) -> tuple[Rewrite, ...]:
    """The rewrites of a plan's file for a step, checked against it: what an engine applies.

    With `other_rows` the file may be for a graph of other sizes with the same operators: that of a rank which exchanges
    other numbers of rows.

    Raises:
        JobError: as `read_plan`.
    """
    return _applied(path, iteration, num_ranks, other_rows=other_rows)[1]


def _applied(
    path: Path, iteration: Iteration, num_ranks: int, *, other_rows: bool = False
) -> tuple[str, tuple[Rewrite, ...], Iteration]:
    """(planner, rewrites, what they make of the step)."""
    held = _decoded(path)
    if held.plan.num_ranks != num_ranks:
        raise JobError(f"plan {str(path)!r} is for {held.plan.num_ranks} ranks, this job has {num_ranks}")
    digest = graph_digest(iteration)
    if held.plan.graph != digest and not other_rows:
        raise JobError(
            f"plan {str(path)!r} is for another graph: it names {held.plan.graph}, this job's graph is {digest}"
        )
    rewrites: tuple[Rewrite, ...] = tuple(rewrite_of(table) for table in held.rewrite)
    try:
        return held.plan.planner, rewrites, rewritten(iteration, rewrites)
    except JobError as error:
        raise JobError(f"plan {str(path)!r}: {error}") from None


def _decoded(path: Path) -> _File:
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise JobError(f"plan {str(path)!r} has more than {MAX_PLAN_BYTES} bytes, the most that is allowed")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise JobError(f"plan {str(path)!r} does not exist") from None
    except OSError as error:
        raise JobError(f"plan {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise JobError(f"plan {str(path)!r} is not UTF-8 text (byte {error.start})") from None
    try:
        held = msgspec.convert(tomllib.loads(text), _File)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise JobError(f"plan {str(path)!r} is no plan: {str(error).replace('`', '')}") from None
    if held.plan.version != VERSION:
        raise JobError(f"plan {str(path)!r} has version {held.plan.version}; this lagom reads version {VERSION}")
    return held
