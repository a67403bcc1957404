"""What a rank of a training job loads of ours: no simulator, no planner, and the search on rank 0 alone."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

MOST_MODULES = 70
"""Of ours. The simulator alone would bring more."""


def loaded_by(module: str) -> set[str]:
    """Our modules in a fresh process that imports that one."""
    code = (
        f"import sys, {module}\n"
        "print(' '.join(name for name in sys.modules if name.partition('.')[0] == 'lagom_overlap'))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("module", ["lagom_overlap.online.tuner", "lagom_overlap.online.launch_session"])
def test_a_rank_that_tunes_online_loads_neither_simulator_nor_planner_nor_search(module: str) -> None:
    loaded = loaded_by(module)
    assert len(loaded) <= MOST_MODULES, sorted(loaded)
    packages = {name.split(".")[1] for name in loaded if "." in name}
    assert not packages & {"analysis", "backends", "capturing", "cost", "jobfile", "planners", "sim", "trace", "verbs"}
    # Rank 0 searches, and a job is on one backend: the others' part is loaded where it is used.
    assert not loaded & {
        f"lagom_overlap.{name}" for name in ("online.ranks.leader", "online.routes.gloo", "online.routes.nccl")
    }
