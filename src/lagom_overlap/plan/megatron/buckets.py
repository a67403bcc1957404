"""Gradients reduced by bucket: parameters in reverse order, a bucket is closed once it holds enough elements."""

from collections.abc import Iterator, Sequence

from lagom_overlap.plan.step_index import StepIndex
from lagom_overlap.workload import CommOp
from lagom_overlap.workload.rewrite.fuse import same_kind
from lagom_overlap.workload.rewrite.steps import Fuse


def bucket_sizes(elements: Sequence[int], bucket_elements: int) -> list[list[int]]:
    """Which parameters (by place in backward order) share a bucket."""
    buckets: list[list[int]] = [[]]
    held = 0
    for place, size in enumerate(elements):
        buckets[-1].append(place)
        held += size
        if held >= bucket_elements:
            buckets.append([])
            held = 0
    return [bucket for bucket in buckets if bucket]


def _runs(index: StepIndex) -> Iterator[list[CommOp]]:
    """Gradient collectives by kind and group, each in program order; a chain's later members stay where they are."""
    runs: list[list[CommOp]] = []
    taken = {op.name for op in index.gradient_comms}
    for op in index.gradient_comms:
        if any(dep in taken for dep in op.deps):
            continue
        for run in runs:
            if same_kind(run[0], op):
                run.append(op)
                break
        else:
            runs.append([op])
    yield from runs


def bucket_rewrites(index: StepIndex, bucket_elements: int, element_bytes: int) -> list[Fuse]:
    """The fusions that make buckets; gradients have `element_bytes` each."""
    found = []
    for run in _runs(index):
        elements = [op.collective.num_bytes // element_bytes for op in run]
        for bucket in bucket_sizes(elements, bucket_elements):
            if len(bucket) > 1:
                found.append(Fuse(tuple(run[place].name for place in bucket)))
    return found
