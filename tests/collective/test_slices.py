import pytest
from hypothesis import given
from hypothesis import strategies as st

from lagom_overlap.collective import chunk_bytes_of_slice, slices_per_chunk
from lagom_overlap.units import KIB, MIB


@pytest.mark.parametrize(
    ("slice_kib", "chunk_kib"),
    [
        (684, 1368),  # the paper's AllGather: two slices in a chunk
        (1366, 1366),  # the paper's ReduceScatter: three steps, rounded up to four, one slice
        (2048, 2048),  # the paper's default, 2 MB
        (512, 2048),
        (513, 1026),
        (1024, 2048),
        (1025, 1025),
        (16, 64),
    ],
)
def test_worked_slices_become_chunks(slice_kib: int, chunk_kib: int) -> None:
    assert chunk_bytes_of_slice(slice_kib * KIB) == chunk_kib * KIB


@given(st.integers(1, 2 * MIB))
def test_a_chunk_holds_whole_slices_and_at_most_four_steps(slice_bytes: int) -> None:
    # AutoCCL's rule told with NCCL's buffer: a slice takes 1, 2 or 4 of the chunk's 4 steps of 512 KiB.
    steps_of_slice = next(steps for steps in (1, 2, 4) if slice_bytes <= steps * 512 * KIB)
    assert slices_per_chunk(slice_bytes) * steps_of_slice == 4
    assert slice_bytes <= chunk_bytes_of_slice(slice_bytes) <= 2 * MIB


@pytest.mark.parametrize("slice_bytes", [0, -1, 2 * MIB + 1])
def test_a_slice_outside_the_buffer_is_refused(slice_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"slice of {slice_bytes} bytes, must be between 1 and 2097152"):
        chunk_bytes_of_slice(slice_bytes)
