"""The C driver of the workers: random collectives in flight on 2 and 3 ranks, every element checked, then a cut."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"


def test_random_collectives_are_right_and_a_cut_connection_fails_them_all(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    driver = tmp_path / "stress_workers"
    source = CSRC / "stress_workers.c"
    subprocess.run([compiler, "-std=c11", "-O2", "-o", str(driver), str(source), "-lpthread"], check=True)
    for num_ranks in (2, 3):
        ran = subprocess.run([str(driver), "150", str(num_ranks), "7"], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout
        assert f"{10 * num_ranks} failed after the cut" in ran.stdout
