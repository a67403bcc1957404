"""Groups by examples drawn by hand; times in ns, well apart from `NEAR_NS` where they must be."""

from dataclasses import replace

import pytest
from gpu_traces import gpu_trace

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.analysis.groups import NEAR_NS, BoundBy, grouped, overlap_groups
from lagom_overlap.analysis.traced_job import bases_alone
from lagom_overlap.trace.gpu_trace import EMULATED_GPU, EventRole

K, C = EventRole.COMPUTE, EventRole.COMM
MS = 1_000_000


def trace_of(*steps, rank=0, length=100 * MS, **fields):
    """Steps given as rows (role, name, start, end, launch) in ms since the step's start."""
    rows, names, launches, windows, calls = [], [], [], [], []
    for number, step in enumerate(steps):
        at = number * length
        windows.append((number, at, at + length))
        for role, name, start, end, *launch in sorted(step, key=lambda row: row[2]):
            rows.append((role, at + round(start * MS), at + round(end * MS)))
            names.append(name)
            launches.append(at + round((launch[0] if launch else start) * MS))
            if role is C:
                calls.append({"communicator": name})
    return gpu_trace(rows, names=names, launches=launches, steps=windows, calls=calls, rank=rank, **fields)


def groups_of(*traces):
    return overlap_groups(analyse(traces))


LAYERS = [  # two kernels during an all-gather that ends later, then one during one that ends earlier
    (K, "a", 0, 10, 0),
    (K, "b", 10, 20, 0),
    (C, "gather", 0, 30),
    (K, "c", 30.002, 50, 0),
    (C, "scatter", 31, 40),
    (K, "d", 50, 60, 0),
]


def test_a_join_is_where_the_computation_waited_for_a_collective():
    first, second = groups_of(trace_of(LAYERS))
    assert [kernel.key.name for kernel in first.kernels] == ["a", "b"]
    assert [comm.key.communicator for comm in first.comms] == ["gather"]
    assert (first.bound, first.makespan_ns, first.comp_ns) == (BoundBy.COMMUNICATION, 30 * MS, 20 * MS)
    assert first.exposed_ns == 10 * MS
    assert [kernel.key.name for kernel in second.kernels] == ["c", "d"]
    assert (second.bound, second.comm_ns, second.exposed_ns) == (BoundBy.COMPUTE, 9 * MS, 0)


def test_a_collective_starts_after_the_kernels_that_had_ended():
    held = [(K, "a", 0, 10, 0), (K, "b", 10, 20, 0), (K, "c", 20, 30, 0), (C, "x", 2, 4), (C, "y", 20, 25)]
    (group,) = groups_of(trace_of(held))
    assert [comm.starts_after for comm in group.comms] == [0, 2]


def test_a_kernel_that_waited_for_the_cpu_makes_no_join():
    late = [(K, "a", 0, 10, 0), (C, "x", 0, 20), (K, "b", 20.002, 30, 20.001)]
    (group,) = groups_of(trace_of(late))
    assert len(group.kernels) == 2


def test_a_kernel_that_starts_long_after_the_end_makes_no_join():
    gap = 20 + 2 * NEAR_NS / MS
    (group,) = groups_of(trace_of([(K, "a", 0, 10, 0), (C, "x", 0, 20), (K, "b", gap, 30, 0)]))
    assert len(group.kernels) == 2


def test_a_collective_beside_no_kernel_belongs_to_the_kernels_before_it():
    """What it is set to changes the step by all of its time."""
    (group,) = groups_of(trace_of([(K, "a", 0, 10, 0), (C, "x", 10, 20), (K, "b", 20.001, 30, 0)]))
    assert [kernel.key.name for kernel in group.kernels] == ["a"]
    assert (group.comms[0].starts_after, group.makespan_ns, group.exposed_ns) == (1, 20 * MS, 10 * MS)
    assert group.bound == BoundBy.COMMUNICATION


def test_the_host_s_launches_say_nothing_of_joins_on_emulated_gpus():
    late = [(K, "a", 0, 10, 0), (C, "x", 0, 20), (K, "b", 20.002, 30, 500)]
    (group,) = groups_of(replace(trace_of(late), gpu_name=f"NVIDIA A40{EMULATED_GPU}"))
    assert len(group.kernels) == 1


def test_equal_windows_of_a_step_are_one_group():
    step = []
    for at in (0, 30, 60):
        step += [(K, "a", at + 0.002, at + 20, 0), (C, "x", at, at + 30)]
    (group,) = groups_of(trace_of(step))
    assert (group.num_occurrences, group.per_step) == (3, 3.0)


def test_groups_are_pooled_over_steps_and_ranks_with_medians():
    def slower(by):
        return [(K, "a", 0, 10 + by, 0), (C, "x", 0, 30 + by), (K, "b", 30.002 + by, 50, 0)]

    ranks = [trace_of(slower(0), slower(1), slower(2), rank=0), trace_of(slower(3), slower(4), rank=1)]
    (group,) = groups_of(*ranks)
    assert (group.num_occurrences, group.per_step, group.agreement) == (5, 1.0, 1.0)
    assert group.makespan_ns == pytest.approx(32 * MS)
    assert group.kernels[0].median_ns == pytest.approx(12 * MS)


def test_one_step_out_of_line_makes_no_group_of_its_own():
    odd = [(K, "a", 0, 25, 0), (K, "b", 25, 28, 0), (C, "gather", 0, 24), (K, "c", 30.002, 50, 0),
           (C, "scatter", 31, 40), (K, "d", 50, 60, 0)]  # fmt: skip
    first, second = groups_of(trace_of(LAYERS, LAYERS, odd))
    assert (first.num_occurrences, second.num_occurrences) == (3, 3)
    assert first.bound is BoundBy.COMMUNICATION
    assert first.agreement == pytest.approx(2 / 3)


def test_a_join_that_only_a_minority_of_steps_shows_cuts_nothing():
    hidden = [(K, "a", 0, 10, 0), (C, "gather", 0, 8), (K, "b", 10, 20, 0)]
    waited = [(K, "a", 0, 10, 0), (C, "gather", 0, 15), (K, "b", 15.002, 25, 0)]
    (group,) = groups_of(trace_of(hidden, hidden, waited))
    assert (len(group.kernels), group.num_occurrences, group.bound) == (2, 3, BoundBy.COMPUTE)


def test_a_step_with_other_kernels_has_groups_of_its_own():
    other = [(K, "z", 0, 10, 0), (C, "gather", 0, 8)]
    assert [group.num_occurrences for group in groups_of(trace_of(LAYERS, LAYERS, other))] == [2, 2, 1]


def test_files_without_a_timeline_have_no_groups():
    assert groups_of(gpu_trace([])) == ()


def test_halves_are_the_rank_s_steps_in_turn_whichever_of_them_has_the_group():
    """Kernels' times alone are halved by the step's number, too: half of them must not be the other half's."""
    early = [(K, "a", 0, 10, 0), (C, "x", 0, 30), (K, "b", 30.002, 50, 0)]
    late = [(K, "a", 0, 12, 0), (C, "x", 0, 32), (K, "b", 32.002, 50, 0)]
    without = [(K, "b", 30.002, 50, 0)]
    first, second = grouped(analyse([trace_of(without, early, late, early)])).halves
    [(name, group)] = first.items()
    assert group.makespan_ns == pytest.approx(32 * MS)  # steps 0 and 2
    assert second[name].makespan_ns == pytest.approx(30 * MS)  # steps 1 and 3
    assert second[name].num_occurrences == 2


def test_what_runs_before_the_first_step_is_in_neither_half():
    rows = [(K, at * MS, (at + length) * MS) for at, length in ((0, 9), (10, 9), (20, 9))]
    rows += [(K, (start + at) * MS, (start + at + 1) * MS) for start in (100, 200) for at in (0, 10, 20)]
    trace = gpu_trace(rows, steps=[(0, 100 * MS, 200 * MS), (1, 200 * MS, 300 * MS)])
    for half in (0, 1):
        assert list(bases_alone(analyse([trace]), half).values()) == [1 * MS]
