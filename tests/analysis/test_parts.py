"""Overlap by phase, process group and wire, on timelines worked by hand."""

import pytest
from gpu_traces import gpu_trace

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.analysis.parts import BETWEEN, WITHIN
from lagom_overlap.trace.gpu_trace import EventRole
from lagom_overlap.workload import Phase

COMM, COMP = EventRole.COMM, EventRole.COMPUTE


def parts(trace, by, **options):
    held = [part for part in analyse([trace], **options).parts if part.by == by]
    return {part.name: (part.compute_ns, part.comm_ns, part.exposed_ns, part.num_calls) for part in held}


def test_an_event_belongs_to_the_phase_that_launched_it_whatever_it_runs_beside():
    """The collective launched in the forward pass runs under a kernel of the backward pass: hidden, and forward."""
    rows = [(COMP, 0, 100), (COMM, 100, 200), (COMP, 120, 200), (COMM, 200, 300), (COMP, 300, 350)]
    trace = gpu_trace(
        rows,
        launches=[-50, -40, 10, 20, 60],
        phases=((Phase.BACKWARD, 0, 50), (Phase.OPTIMIZER, 55, 70)),
    )
    assert parts(trace, "phase") == {
        "forward": (100, 100, 20, 1),
        "backward": (80, 100, 100, 1),
        "optimizer": (50, 0, 0, 0),
    }
    assert parts(gpu_trace(rows, launches=[-50, -40, 10, 20, 60]), "phase") == {}


def test_groups_count_what_they_run_at_once_only_once():
    rows = [(COMM, 0, 100), (COMM, 50, 150), (COMM, 100, 300), (COMP, 0, 60)]
    calls = [{"communicator": "tp"}, {"communicator": "tp"}, {"communicator": "dp"}]
    assert parts(gpu_trace(rows, calls=calls, streams=[1, 2, 3, 0]), "group") == {
        "dp": (0, 200, 200, 1),
        "tp": (0, 150, 90, 2),
    }


@pytest.mark.parametrize(
    ("ranks", "num_ranks", "gpus", "wire"),
    [
        ((0, 1, 2, 3), 4, None, WITHIN),
        ((0, 8), 2, None, BETWEEN),
        ((0, 8), 2, 16, WITHIN),
        ((), 64, None, BETWEEN),
        ((), 4, None, None),
    ],
)
def test_a_group_stays_within_a_node_if_its_ranks_do(ranks, num_ranks, gpus, wire):
    trace = gpu_trace([(COMM, 0, 100)], calls=[{"ranks": ranks, "num_ranks": num_ranks}])
    assert list(parts(trace, "wire", gpus_per_node=gpus)) == ([wire] if wire else [])


def test_a_trace_that_lists_its_gpus_says_how_many_a_node_has():
    trace = gpu_trace([(COMM, 0, 100)], calls=[{"ranks": (0, 4), "num_ranks": 2}], num_gpus=4)
    assert list(parts(trace, "wire")) == [BETWEEN]
