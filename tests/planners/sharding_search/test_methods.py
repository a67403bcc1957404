"""ZeRO's stages as restrictions of the search: what is cut, what moves, what is held."""

from collections import Counter

import pytest

pytest.importorskip("ortools", reason="needs the extra plan")

from small_programs import mlp_training, problem_of

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.planners.sharding_search.emit import emit
from lagom_overlap.planners.sharding_search.integer_program import FoundSharding, choose_sharding
from lagom_overlap.planners.sharding_search.search import data_parallel

PROGRAM = mlp_training(1 << 14, 1024)
BYTES = 2 * 2 * 1024 * 4096
"""Two matrices, 2 bytes per element."""


def found(stage: int) -> FoundSharding:
    return choose_sharding(data_parallel(problem_of(PROGRAM, 8), stage))


def moved(sharding: FoundSharding) -> Counter[CollectiveKind]:
    total: Counter[CollectiveKind] = Counter()
    for comm in emit(sharding, name="zero").iteration.comms:
        total[comm.collective.kind] += comm.collective.num_bytes
    return total


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, {CollectiveKind.ALL_REDUCE: BYTES}),
        (1, {CollectiveKind.REDUCE_SCATTER: BYTES, CollectiveKind.ALL_GATHER: BYTES}),
        (2, {CollectiveKind.REDUCE_SCATTER: BYTES, CollectiveKind.ALL_GATHER: BYTES}),
        (3, {CollectiveKind.REDUCE_SCATTER: BYTES, CollectiveKind.ALL_GATHER: 3 * BYTES // 2}),
    ],
)
def test_a_stage_moves_what_zero_says(stage: int, expected: dict[CollectiveKind, int]) -> None:
    """ZeRO (arXiv 1910.02054, section 7): 2 psi for stages 1 and 2, 3 psi for 3, counted in whole tensors.

    Stage 3 gathers in forward and in backward; the first matrix is not needed in this backward, which has no gradient
    of the input.
    """
    assert moved(found(stage)) == expected


def test_memory_falls_with_the_stage() -> None:
    """Parameters of 2 bytes and 12 bytes of state per element: cut by 8 ranks from stage 1, and stage 3."""
    peaks = [found(stage).peak_bytes for stage in (0, 1, 3)]
    assert peaks[0] > peaks[1] > peaks[2]
    assert peaks[0] - peaks[1] >= 0.8 * 6 * BYTES * 7 // 8


@pytest.mark.parametrize("stage", [-1, 4])
def test_there_are_four_stages(stage: int) -> None:
    with pytest.raises(JobError, match="must be 0 to 3"):
        data_parallel(problem_of(PROGRAM, 8), stage)
