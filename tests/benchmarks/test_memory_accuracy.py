"""What is said of memory's accuracy is what the kept peaks of PyTorch's allocator show."""

import csv

import pytest

from lagom_overlap.workload.parallel.eager_memory import NUM_JOBS, WORST_ALLOCATED, WORST_RESERVED
from memory_accuracy import JOBS, PEAKS, Job, counted

with PEAKS.open(newline="") as file:
    ROWS = {row["job"]: (int(row["allocated"]), int(row["reserved"])) for row in csv.DictReader(file)}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_job_needs_what_simulate_counts(job: Job) -> None:
    allocated, reserved = ROWS[job.name]
    memory = counted(job)
    assert memory.total_bytes == pytest.approx(allocated, rel=WORST_ALLOCATED)
    assert memory.reserved_bytes == pytest.approx(reserved, rel=WORST_RESERVED)


def test_the_accuracy_that_simulate_states_is_that_of_all_jobs() -> None:
    assert {job.name for job in JOBS} == set(ROWS)
    assert len(ROWS) == NUM_JOBS
