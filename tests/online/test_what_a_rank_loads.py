"""What a rank of a training job loads of ours: no simulator, no planner, and the search on rank 0 alone."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

MOST_MODULES = 70
"""Of ours that the tuner may bring. The simulator alone would bring more."""
MOST_OF_A_RANK = 75
"""With what begins a rank of `lagom run --online`."""


def loaded_by(*modules: str) -> list[set[str]]:
    """Our modules in a fresh process after each of the imports."""
    tell = "print(' '.join(name for name in sys.modules if name.partition('.')[0] == 'lagom_overlap'))"
    code = "import sys\n" + "".join(f"import {module}\n{tell}\n" for module in modules)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in ran.stdout.splitlines()]


@pytest.mark.timeout(300)
def test_a_rank_that_tunes_online_loads_neither_simulator_nor_planner_nor_search() -> None:
    # The second imports the first, and torch takes most of the time: one process.
    tuner, loaded = loaded_by("lagom_overlap.online.tuner", "lagom_overlap.online.launch_session")
    assert tuner < loaded
    assert len(tuner) <= MOST_MODULES, sorted(tuner)
    assert len(loaded) <= MOST_OF_A_RANK, sorted(loaded)
    packages = {name.split(".")[1] for name in loaded if "." in name}
    assert not packages & {"analysis", "backends", "capturing", "cost", "jobfile", "planners", "sim", "trace", "verbs"}
    # Rank 0 searches, and a job is on one backend: the others' part is loaded where it is used.
    assert not loaded & {
        f"lagom_overlap.{name}" for name in ("online.ranks.leader", "online.routes.gloo", "online.routes.nccl")
    }
