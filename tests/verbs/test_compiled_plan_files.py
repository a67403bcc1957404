"""Plans of compiled graphs, written once and applied in another run of torch.compile: two gloo ranks, end to end."""

import json
import shutil
import tomllib

import pytest
import tomli_w

from forked_python import COMPILER, run_ranks

pytestmark = [pytest.mark.torch, pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = """
import json, os, re, sys
from pathlib import Path
import msgspec, torch
from torch import distributed as dist
from torch._inductor.utils import run_and_get_code
from lagom_overlap.export.inductor import plan_compiled_graphs
from lagom_overlap.verbs.plan_apply import PlanFile, save_plans
from lagom_overlap.workload.iteration import graph_digest
from lagom_overlap.workload.rewrite.tables import table_of
C10D = torch.ops._c10d_functional

dist.init_process_group("gloo")
group, rank = dist.group.WORLD, dist.get_rank()
use, depth = sys.argv[1], int(sys.argv[2])
torch._inductor.config.fx_graph_cache = False


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard):
        return C10D.wait_tensor(C10D.all_gather_into_tensor(shard, group.size(), group.group_name))

    @staticmethod
    def backward(ctx, grad):
        return C10D.wait_tensor(C10D.reduce_scatter_tensor(grad, "sum", group.size(), group.group_name))


def step(x, *shards):
    for shard in shards:
        x = torch.relu(x @ Gathered.apply(shard))
    return x.square().sum()


def gradients(function, inputs):
    inputs = [one.clone().requires_grad_(number > 0) for number, one in enumerate(inputs)]
    loss = function(*inputs)
    loss.backward()
    return [loss.detach(), *(one.grad for one in inputs[1:])]


generator = torch.Generator().manual_seed(rank)
inputs = [torch.randn((4, 8), generator=generator) for _ in range(1 + depth)]
wanted = gradients(step, inputs)
found = {}
try:
    made = plan_compiled_graphs(million_steps=0.5, decide=None if use == "plan" else PlanFile(Path("plans")))
    outputs, codes = run_and_get_code(gradients, torch.compile(step, dynamic=False), inputs)
except Exception as error:
    found = {"error": next(line for line in str(error).splitlines() if "JobError" in line)}
else:
    found["equal"] = all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(outputs, wanted))
    found["values"] = [one.tolist() for one in outputs]
    found["graphs"] = {
        graph_digest(seen.capture.iteration): json.loads(msgspec.json.encode([table_of(r) for r in seen.rewrites]))
        for seen in made.seen
    }
    found["orders"] = [seen.order_digest for seen in made.seen]
    call = re.compile(r"\\s*(?:\\w+ = )?torch\\.ops\\._c10d_functional\\.(\\w+)[.(]")
    found["calls"] = [[held.group(1) for line in code.splitlines() if (held := call.match(line))] for code in codes]
    if use == "plan":
        save_plans(made, Path("plans"))
Path(f"found_{rank}.json").write_text(json.dumps(found))
dist.barrier()
os._exit(0)  # gloo's threads drop the last call's tensors and need Python for it (PyTorch issue 190489)
"""


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A folder with the plans of a step of three layers, and what the run that made them found."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "train.py").write_text(TRAIN)
    return folder, trained(folder, "plan", 3)


def trained(folder, use, depth):
    """What the two ranks of a job of the user's found."""
    run_ranks("train.py", [use, str(depth)], 2, cwd=folder, imports=COMPILER)
    return [json.loads((folder / f"found_{rank}.json").read_text()) for rank in (0, 1)]


def test_plans_of_one_run_are_those_of_the_next_without_a_planner(planned):
    folder, (first, second) = planned
    assert first["equal"]
    assert second["equal"]
    assert first["orders"] == second["orders"]
    assert len(first["graphs"]) == 2  # forward and backward
    assert any(first["graphs"].values()), "nothing was planned: the run below would show nothing"
    assert {path.stem for path in (folder / "plans").iterdir()} == first["graphs"].keys()
    again = trained(folder, "apply", 3)
    assert again == [first, second]


def test_a_graph_without_a_plan_is_refused_on_both_ranks(planned):
    first, second = trained(planned[0], "apply", 2)
    assert "JobError: 'plans' has no plan of this graph" in first["error"]
    assert "JobError: rank 0: 'plans' has no plan of this graph" in second["error"]


@pytest.mark.long
def test_an_edited_plan_is_what_is_compiled(planned, tmp_path):
    """Every gather just before its product, where the planner's had gathered ahead."""
    folder, (before, _) = planned
    (tmp_path / "train.py").write_text(TRAIN)
    shutil.copytree(folder / "plans", tmp_path / "plans")
    for path in (tmp_path / "plans").iterdir():
        held = tomllib.loads(path.read_text())
        order = held["rewrite"][-1]["order"] if held.get("rewrite") else []
        gathers = iter(sorted(name for name in order if "all_gather" in name))
        if order and not any("reduce_scatter" in name for name in order):
            late = [name for name in order if "all_gather" not in name]
            late = [each for name in late for each in ((next(gathers), name) if name.startswith("mm") else (name,))]
            held["rewrite"][-1] |= {"order": late, "waits": []}
            path.write_text(tomli_w.dumps(held))
    first, second = trained(tmp_path, "apply", 3)
    assert first["equal"]
    assert second["equal"]
    forward = next(number for number, calls in enumerate(first["calls"]) if "reduce_scatter_tensor" not in calls)
    assert before["calls"][forward][:2] == ["all_gather_into_tensor"] * 2
    assert first["calls"][forward] == ["all_gather_into_tensor", "wait_tensor"] * 3
