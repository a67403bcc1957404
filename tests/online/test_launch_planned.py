"""A plan of `lagom run --config` is told to FSDP2 on all ranks or on none, whoever cannot read it."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from job_of_threads import FakeStore

torch = pytest.importorskip("torch")
from torch import distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from lagom_overlap.errors import BackendError  # noqa: E402
from lagom_overlap.export.plugin_table import checksum_of  # noqa: E402
from lagom_overlap.online.launch_planned import AsStarted, tell_on_all  # noqa: E402
from lagom_overlap.online.ranks.exchange import Exchange  # noqa: E402
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings  # noqa: E402

pytestmark = pytest.mark.torch
NUM_RANKS = 2
PLAN = msgspec.json.encode(Fsdp2Settings(units=("0", "1"), kept=("1",), forward_prefetch=1))


def kept(model):
    """Whether the plan's unit holds its parameters from forward to backward, as FSDP2 itself has it."""
    (group,) = model[1]._get_fsdp_state()._fsdp_param_groups
    return group.post_forward_mesh_info is None


@pytest.fixture
def models():
    """The model of each rank, which is a thread here; each is sharded over the one process that there is."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = []
    for _ in range(NUM_RANKS):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        for layer in model:
            fully_shard(layer)
        made.append(fully_shard(model))
    yield made
    dist.destroy_process_group()


@pytest.fixture
def environments(tmp_path):
    """What the launcher told each rank, with the folder as its machine has it."""
    paths = [tmp_path / f"rank{rank}.json" for rank in range(NUM_RANKS)]
    for path in paths:
        path.write_bytes(PLAN)
    told = {"LAGOM_RUN_CONFIG": "plan.toml", "LAGOM_RUN_WORLD": str(NUM_RANKS)}
    return [told | {"LAGOM_RUN_PLAN": str(path), "LAGOM_RUN_PLAN_CHECKSUM": checksum_of(PLAN)} for path in paths]


def tell(models, environments, timeout_s=30.0):
    store = FakeStore()

    def rank(number):
        exchange = Exchange(store, rank=number, num_ranks=NUM_RANKS, timeout_s=timeout_s)
        try:
            return tell_on_all(models[number], exchange, environments[number])
        except BackendError as error:
            return error

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(rank, range(NUM_RANKS)))


def test_all_ranks_tell_fsdp2_the_plan(models, environments):
    assert tell(models, environments) == ["", ""]
    assert [kept(model) for model in models] == [True, True]


def lose(path):
    path.unlink()


def replace(path):
    path.write_bytes(msgspec.json.encode(Fsdp2Settings(units=("0", "1"), kept=("0",))))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lose, "rank 1: cannot read the plan .*rank1.json: No such file"),
        (replace, "rank 1: .*is not the plan that was written at the start"),
    ],
)
def test_what_one_rank_lacks_all_do_without_and_know_why(models, environments, harm, words):
    harm(Path(environments[1]["LAGOM_RUN_PLAN"]))
    (refusal,) = set(tell(models, environments))
    assert re.match(words, refusal)
    assert [kept(model) for model in models] == [False, False]


def test_ranks_that_were_started_with_different_plans_are_told_neither(models, environments):
    other = msgspec.json.encode(Fsdp2Settings(units=("0", "1")))
    Path(environments[1]["LAGOM_RUN_PLAN"]).write_bytes(other)
    environments[1]["LAGOM_RUN_PLAN_CHECKSUM"] = checksum_of(other)
    (refusal,) = set(tell(models, environments))
    assert "was started with other settings than the others" in refusal
    assert [kept(model) for model in models] == [False, False]


def test_a_rank_that_fails_half_way_ends_the_job_on_all_ranks(models, environments, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no more memory")

    monkeypatch.setattr(models[1][1], "set_reshard_after_forward", fail)
    errors = tell(models, environments)
    assert all("rank 1 failed: no more memory" in str(error) for error in errors)
    assert all(isinstance(error, BackendError) for error in errors)


def test_a_plan_of_another_world_is_told_nobody(models, environments):
    """Through the door that the session uses, in a job of one rank."""
    session = AsStarted(environments[0])
    session.on_model(models[0])
    assert session.why_void() == "rank 0: the settings 'plan.toml' were found with 2 ranks, this job has 1"
    assert not kept(models[0])
