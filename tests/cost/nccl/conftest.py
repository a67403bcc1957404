"""Puts the benchmark scripts on the path; finds the golden files and measurements, which the project does not hold."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))


def shared_folder(name: str) -> Path:
    """A folder of the data made elsewhere; skips the test, saying so, where it is absent."""
    roots = [Path(os.environ[key]) for key in ("LAGOM_DATA", "LAGOM_SHARED_DATA") if os.environ.get(key)]
    for root in [*roots, ROOT.parent / "shared" / "data"]:
        if (root / name).is_dir():
            return root / name
    pytest.skip(f"{name}: no such folder in $LAGOM_DATA or ../shared/data")


@pytest.fixture(scope="session")
def golden() -> Path:
    """NCCL's own choices on synthetic topologies."""
    return shared_folder("nccl_golden")


@pytest.fixture(scope="session")
def vidur() -> Path:
    """Measured collectives of microsoft/vidur."""
    return shared_folder("vidur")
