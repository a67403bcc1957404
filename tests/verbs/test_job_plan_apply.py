"""A plan made once and applied by every rank of a job of the user's own: equal results, and no run with two plans."""

import json
from pathlib import Path

import pytest

from forked_python import run_ranks
from lagom_overlap.cli import main
from lagom_overlap.errors import JobError
from lagom_overlap.workload import CompOp
from lagom_overlap.workload.issued import IssuedStep

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow]

STEP = """
import torch
from torch import distributed as dist
C10D = torch.ops._c10d_functional

def gathered(x):
    group = dist.group.WORLD
    return C10D.wait_tensor(C10D.all_gather_into_tensor(x, group.size(), group.group_name))

def step():
    def run(x, *shards):
        for shard in shards:
            x = torch.relu(x @ gathered(shard))
        return (x,)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return run, [torch.randn(shape, generator=generator) for shape in ((4, 8), (4, 8), (4, 8), (4, 8))]
"""

JOB = """
[job]
name = "mine"
ranks = 2
[cluster]
preset = "a40_nvlink"
[program]
script = "mine.py"
[plan]
planner = "program_order"
"""

TRAIN = """
import json, os, sys
from pathlib import Path
import torch
from torch import distributed as dist
from lagom_overlap.errors import LagomError
from lagom_overlap.verbs.plan_apply import planned_step
from mine import step

dist.init_process_group("gloo")
run, inputs = step()
rank = dist.get_rank()
found = {}
try:
    planned = planned_step(run, inputs, Path(sys.argv[1 + rank]))
except LagomError as error:
    found = {"error": f"{type(error).__name__}: {error}"}
else:
    outputs = planned.run(inputs).outputs
    planned.close()
    wanted = run(*inputs)
    found = {"equal": all(torch.allclose(a, b, atol=1e-5) for a, b in zip(outputs, wanted))}
Path(f"found_{rank}.json").write_text(json.dumps(found))
dist.barrier()
os._exit(0)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """A plan of the step by the command line, with every gather at the front."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(STEP)
    Path("train.py").write_text(TRAIN)
    Path("job.toml").write_text(JOB)
    assert main(["plan", "job.toml", "--planner", "ours", "--out", "planned"]) == 0
    return Path("planned/plan.toml")


def trained(*plans):
    """What the two ranks of a job of the user's found, each with its own plan file."""
    run_ranks("train.py", [str(plan) for plan in plans], 2)
    return [json.loads(Path(f"found_{rank}.json").read_text()) for rank in (0, 1)]


def test_one_plan_on_all_ranks_gives_the_steps_results(plan):
    Path("copy.toml").write_bytes(plan.read_bytes())
    assert trained(plan, "copy.toml") == [{"equal": True}] * 2


def test_ranks_with_two_plans_run_nothing_and_say_so(plan):
    assert main(["plan", "job.toml", "--planner", "program_order", "--out", "other"]) == 0
    assert (
        plan.read_text().partition("[[rewrite]]")[2] != Path("other/plan.toml").read_text().partition("[[rewrite]]")[2]
    )
    first, second = trained(plan, "other/plan.toml")
    assert first["error"].startswith("BackendError: ranks 0 and 1 have different plans")
    assert second["error"].startswith("BackendError: ranks 0 and 1 have different plans")


def test_a_plan_that_one_rank_lacks_is_refused_on_all(plan):
    first, second = trained(plan, "nothing.toml")
    assert first == {"error": "JobError: rank 1: plan 'nothing.toml' does not exist"}
    assert second == {"error": "JobError: plan 'nothing.toml' does not exist"}


def test_a_plan_file_decides_for_the_compiler_pass(plan):
    from lagom_overlap.capturing.fake_world import fake_world
    from lagom_overlap.engines.fx.program import load_program
    from lagom_overlap.verbs.plan_apply import PlanFile

    with fake_world(2):
        captured = load_program(Path("mine.py"), "step").captured("pass").capture
    rewrites = PlanFile(plan)(captured, {})
    computations = [op.name for op in captured.iteration.ops if isinstance(op, CompOp)]  # collectives may be fused
    assert sorted(set(rewrites[-1].order) & set(computations)) == sorted(computations)
    foreign = IssuedStep(iteration=captured.iteration, num_ranks=4, groups={"world": (0, 1)})
    with pytest.raises(JobError, match="is for 2 ranks, this job has 4"):
        PlanFile(plan)(foreign)
