"""Rewrites applied to an iteration: a plan becomes the iteration that it means."""

from collections.abc import Iterable

from lagom_overlap.errors import JobError
from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.rewrite.draft import Draft
from lagom_overlap.workload.rewrite.fuse import apply_fuse
from lagom_overlap.workload.rewrite.partition import apply_partition
from lagom_overlap.workload.rewrite.reorder import reordered
from lagom_overlap.workload.rewrite.split import apply_split
from lagom_overlap.workload.rewrite.steps import Fuse, PartitionGroups, Reorder, Rewrite, Split, Substitute
from lagom_overlap.workload.rewrite.substitute import apply_substitute


def rewritten(iteration: Iteration, rewrites: Iterable[Rewrite]) -> Iteration:
    """The iteration after the rewrites, one after the other; names as `steps` gives them.

    Raises:
        JobError: if the iteration does not hold its data flow, or a rewrite names what is not there or cannot be done.
    """
    if not iteration.is_dataflow:
        raise JobError(f"iteration {iteration.name!r} does not hold its data flow: it cannot be rewritten")
    draft = Draft(iteration)
    for step in rewrites:
        match step:
            case Substitute():
                apply_substitute(draft, step)
            case PartitionGroups():
                apply_partition(draft, step)
            case Split():
                apply_split(draft, step)
            case Fuse():
                apply_fuse(draft, step)
            case Reorder():
                draft = Draft(reordered(draft.finished(), step))
    return draft.finished()
