"""Launches that block, in made-up Kineto files worked by hand; times in us."""

import pytest
from kineto_traces import KinetoFile

from lagom_overlap.analysis.advice_rules import advice_of
from lagom_overlap.analysis.findings import analyse
from lagom_overlap.trace.reader import read_traces

RULE = "blocking_launches"


def found(file, path, *, one_by_one=False):
    if one_by_one:  # a number as text: no block of usual events, so each is looked at by itself
        file.add(ph="X", cat="cpu_op", name="odd", pid=1, tid=1, ts="0", dur="1", args={})
    findings = analyse(read_traces([file.write(path)]))
    return findings, {advice.rule: advice for advice in advice_of(findings)}


def slow(file, name, start, length, *, launch, takes):
    """A kernel whose launch takes long."""
    file.kernel(name, start, length, launch=launch)
    file.events[-2]["dur"] = takes


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_first_run_that_blocks_is_counted_with_what_the_gpu_missed(tmp_path, one_by_one):
    file = KinetoFile()
    file.step(1, -10, 10_000)
    file.kernel("a", 0, 1000)
    slow(file, "b", 3000, 1000, launch=900, takes=2100)  # the GPU is idle from 1000 to 3000
    file.kernel("a", 4000, 3000)
    file.kernel("b", 7000, 3000)
    findings, advice = found(file, tmp_path / "t.json", one_by_one=one_by_one)
    (rank,) = findings.ranks
    blocking = rank.blocking
    assert (blocking.num, blocking.num_full, blocking.blocked_ns, blocking.idle_ns) == (1, 0, 2_100_000, 2_000_000)
    assert (blocking.idle_first_ns, blocking.idle_collective_ns, blocking.idle_other_ns) == (2_000_000, 0, 0)
    assert advice[RULE].predicted_gain_s == pytest.approx(2e-3)
    assert "CUDA_MODULE_LOADING=EAGER" in advice[RULE].apply
    assert (
        "1.0 launches per step took 100 us or longer on the CPU, 2.10 ms per step in all (21.0 % of it; the longest, "
        "cudaLaunchKernel, 2.10 ms); for 2.00 ms per step of that nothing ran on the GPU" in advice[RULE].evidence
    )


def test_a_communicator_that_is_made_in_the_step_is_told_as_that(tmp_path):
    file = KinetoFile()
    file.step(1, -10, 20_000)
    file.kernel("a", 0, 1000)
    file.add(
        ph="X",
        cat="cpu_op",
        name="record_param_comms",
        pid=10,
        tid=1,
        ts=500,
        dur=5500,
        args={"Collective name": "allreduce", "External id": 3},
    )
    file.nccl("AllReduce_Sum_bf16_RING_LL", 6000, 500, op="allreduce", nelems=1 << 20, launch=5990.0)
    file.kernel("a", 6500, 10_000)
    findings, advice = found(file, tmp_path / "t.json")
    (rank,) = findings.ranks
    assert rank.blocking.idle_collective_ns == rank.blocking.idle_ns == 5_000_000  # from 1000 to 6000
    assert "init_process_group" in advice[RULE].apply
    assert "the longest, allreduce, 5.50 ms" in advice[RULE].evidence


def test_a_full_queue_costs_nothing_and_is_told_so(tmp_path):
    file = KinetoFile()
    for index in range(1100):  # 200 us each without a gap; from number 1024 on a launch waits until a kernel has ended
        if index < 1024:
            file.kernel("a", 5000 + 200 * index, 200, launch=2000.0 + 2 * index)
        else:
            slow(file, "a", 5000 + 200 * index, 200, launch=5000 + 200.0 * (index - 1024), takes=199)
    findings, advice = found(file, tmp_path / "t.json")
    (rank,) = findings.ranks
    assert (rank.blocking.num, rank.blocking.num_full, rank.blocking.idle_ns) == (76, 76, 0)
    assert RULE not in advice
    (told,) = [text for text in findings.warnings if "queue" in text]
    # 76 launches of 199 us in 220 ms
    assert told.startswith("76 launches blocked because the queue of launches was full")
    assert "6.9 % of the time, in which the GPU had work all the time" in told


def test_launches_as_they_are_say_nothing(tmp_path):
    file = KinetoFile()
    for index in range(50):
        file.kernel("a", 100 * index, 90)
    findings, advice = found(file, tmp_path / "t.json")
    assert findings.ranks[0].blocking.num == 0
    assert not [text for text in findings.warnings if "launches" in text]
    assert RULE not in advice
