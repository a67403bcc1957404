"""Captures that several tests look at."""

import pytest

pytest.importorskip("torch")

from small_steps import capture_small

from lagom_overlap.workload.issued import IssuedStep


@pytest.fixture(scope="session")
def fsdp() -> IssuedStep:
    """FSDP2 on four ranks."""
    return capture_small(fsdp=4)


@pytest.fixture(scope="session")
def tensor_and_fsdp() -> IssuedStep:
    """Tensor and sequence parallelism on two ranks, FSDP2 on two."""
    return capture_small(fsdp=2, tensor=2)
