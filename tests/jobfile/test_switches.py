"""Keys of `[parallel]` that a framework has no switch for are refused by key, framework, and who has it."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.workload.parallel import AttentionKernel, Dispatcher, ParallelTable
from lagom_overlap.workload.step import framework_names, load_rules
from lagom_overlap.workload.step.framework_file import dispatchers, switches
from lagom_overlap.workload.step.rules import Sharding

RULES = {name: load_rules(name) for name in framework_names()}
DISPATCHERS = dispatchers()
SWITCHES = switches()

FORMATS = Path(__file__).parents[2] / "docs" / "formats.md"

LAYOUT = {"data": 8, "zero_stage": 3, "expert": 8, "global_batch": 16}


def step(framework: str, model: str = "mixtral-8x7b", **keys: Any) -> JobStep:
    stage = {"megatron": 1, "megatron_deepspeed": 1, "ddp": 0}.get(framework, 3)
    raw = {
        "job": {"name": "toy"},
        "model": {"name": model, "seq_len": 2048},
        "cluster": {"preset": "h100_dgx"},
        "parallel": LAYOUT | {"framework": framework, "zero_stage": stage} | keys,
    }
    found = Job(parse_job(raw, "job.toml")).step
    assert found is not None
    return found


@pytest.mark.parametrize("framework", ["fsdp2", "torchtitan", "torchtitan_compiled", "deepspeed", "fsdp1"])
@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"recompute": "selective", "recompute_modules": ["moe_act"]}, r"recompute_modules is \['moe_act'\]"),
        ({"overlap_experts": True}, "overlap_experts is true"),
        ({"fused_experts": True}, "fused_experts is true"),
        ({"cuda_graph": True}, "cuda_graph is true"),
        ({"async_tensor": True}, "async_tensor is true"),
        ({"scatter_gather": True}, "scatter_gather is true"),
        ({"dispatcher": "capacity"}, "dispatcher is capacity"),
    ],
)
def test_what_only_megatron_has_is_refused_elsewhere(framework: str, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=rf"parallel\.{words}, but framework {framework} .*allowed with: .*megatron"):
        step(framework, **keys)
    assert step("megatron", **keys).rules.name == "megatron"


def test_a_missing_switch_is_said_before_what_it_would_need() -> None:
    with pytest.raises(JobError, match="overlap_experts is true, but framework fsdp2 has no such switch"):
        step("fsdp2", model="llama-2-7b", expert=1, overlap_experts=True)


def test_what_others_have_too_is_allowed_there() -> None:
    # torchtitan: expert_parallel_comm_backend = "deepep"; DDP: "Usage with DistributedDataParallel" in notes/cuda.rst.
    assert step("torchtitan", dispatcher="merged").layout.dispatcher == "merged"
    assert step("ddp", model="llama-2-7b", expert=1, cuda_graph=True).framework.launch_s == 0
    with pytest.raises(
        JobError, match="but framework deepspeed is modelled with all_to_all; allowed with: megatron, to"
    ):
        step("deepspeed", dispatcher="merged")


@pytest.mark.parametrize("framework", ["megatron", "torchtitan", "deepspeed", "fsdp2"])
def test_whole_experts_are_in_all_of_them(framework: str) -> None:
    """torchtitan: expert_tensor_parallel_degree 1; DeepSpeed: without enable_expert_tensor_parallelism."""
    assert step(framework, tensor=2, data=4, whole_experts=True).layout.whole_experts


def test_a_module_that_is_named_twice_is_refused() -> None:
    with pytest.raises(JobError, match=r"recompute_modules has 'moe' twice, must name each module once"):
        step("megatron", recompute="selective", recompute_modules=["moe", "moe_act", "moe"])


@pytest.mark.parametrize("key", SWITCHES)
def test_the_documentation_names_the_frameworks_that_have_a_switch_and_what_they_call_it(key: str) -> None:
    lines = FORMATS.read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith(f"| `{key}`"))
    for framework, line in SWITCHES[key].items():
        is_fsdp2 = RULES[framework].sharding is Sharding.FSDP2
        assert f"`{framework}`" in row or (is_fsdp2 and "FSDP2" in row)
        named = next((word for word in line.replace(",", " ").split() if set(word) & set("-_")), "")
        assert named in row


def test_every_switch_is_a_key_of_job_files_and_of_frameworks_that_there_are() -> None:
    assert set(SWITCHES) <= {field.name for field in fields(ParallelTable)}
    for having in (*SWITCHES.values(), *DISPATCHERS.values()):
        assert set(having) <= set(RULES)
    assert Dispatcher.ALL_TO_ALL not in DISPATCHERS


@pytest.mark.parametrize("framework", ["deepspeed", "fsdp1"])
def test_parts_of_tensor_parallelism_need_user_buffers_or_async_tp(framework: str) -> None:
    keys = {"tensor": 2, "data": 4, "expert": 4, "sequence_parallel": True, "overlap_tensor": True}
    with pytest.raises(JobError, match=f"overlap_tensor is true, but framework {framework} has no such switch"):
        step(framework, **keys)
    assert step("torchtitan", **keys).layout.overlap_tensor


def test_a_job_asks_for_a_kernel_of_attention() -> None:
    plain, asked = step("megatron"), step("megatron", attention_kernel="flash_attention_2")
    assert plain.layout.attention_kernel is None
    assert asked.layout.attention_kernel is AttentionKernel.FLASH_2


def test_a_kernel_of_flash_attention_is_refused_without_flash_attention() -> None:
    with pytest.raises(JobError, match=r"parallel\.attention_kernel is cudnn, must be absent without flash_attention"):
        step("megatron", attention_kernel="cudnn", flash_attention=False)
