"""What is said of memory's accuracy is what the kept peaks of PyTorch's allocator show."""

import csv
from statistics import median

import pytest

from lagom_overlap.workload.parallel.eager_memory import NUM_JOBS, RESERVED, WORST_ERROR
from memory_accuracy import JOBS, PEAKS, counted

with PEAKS.open(newline="") as file:
    ROWS = {row["job"]: (int(row["allocated"]), int(row["reserved"])) for row in csv.DictReader(file)}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_job_needs_what_simulate_counts(job) -> None:
    allocated, _ = ROWS[job.name]
    assert counted(job) == pytest.approx(allocated, rel=WORST_ERROR)


def test_the_accuracy_that_simulate_states_is_of_these_jobs() -> None:
    shares = [reserved / allocated for allocated, reserved in ROWS.values()]
    assert len(ROWS) == len(JOBS) == NUM_JOBS
    least, usual, most = RESERVED
    assert (least, most) == (round(min(shares), 2), round(max(shares), 2))
    assert usual == round(median(shares), 1)
