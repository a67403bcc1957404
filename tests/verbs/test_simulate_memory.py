"""A job that does not fit is told what fits, and what it is told is true."""

import re
from typing import Any

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.memory import check_memory
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.results.simulate import SimulateResult
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate

FITS = re.compile(r"it fits with (?:all of )?(.*)$")
SETTING = re.compile(r"(\w+) = (\[\]|true|false|\"?[\w.]+\"?)")


def job(parallel: dict[str, Any], model: str = "llama-2-13b", seq_len: int = 4096) -> dict[str, Any]:
    return {
        "job": {"name": "toy"},
        "model": {"name": model, "seq_len": seq_len},
        "cluster": {"preset": "h100_dgx"},
        "parallel": parallel,
    }


def refusal(raw: dict[str, Any]) -> str:
    spec = parse_job(raw, "job.toml")
    step = Job(spec).step
    assert step is not None
    with pytest.raises(JobError) as error:
        check_memory(step)
    return str(error.value)


def values(text: str) -> dict[str, Any]:
    words = {"true": True, "false": False, "[]": []}
    found = SETTING.findall(text)
    return {key: words.get(one, int(one) if one.isdigit() else one.strip('"')) for key, one in found}


def simulate(raw: dict[str, Any]) -> SimulateResult:
    return run_simulate(SimulateRequest(job=Job(parse_job(raw, "job.toml"))))


@pytest.mark.parametrize(
    ("parallel", "model", "key"),
    [
        # Optimizer and parameters in full on every rank: sharding them is what helps.
        ({"data": 4, "tensor": 2, "global_batch": 64}, "llama-2-13b", "zero_stage"),
        # Activations of eight sequences: fewer at once.
        ({"fsdp": 8, "micro_batch": 8, "global_batch": 64}, "llama-2-7b", "micro_batch"),
        # One sequence at a time, everything sharded: computing them again.
        ({"fsdp": 8, "global_batch": 8}, "llama-2-13b", "recompute"),
        ({"data": 8, "zero_stage": 1, "global_batch": 8, "flash_attention": False}, "llama-2-7b", "flash"),
    ],
)
def test_every_change_that_is_advised_makes_the_job_fit(parallel: dict[str, Any], model: str, key: str) -> None:
    raw = job(parallel, model, seq_len=8192 if "fsdp" in parallel else 4096)
    found = FITS.search(refusal(raw))
    assert found is not None
    assert key in found[1]
    for advice in found[1].split("; or "):
        gigabytes = float(advice.rpartition("(")[2].removesuffix(" GB)"))
        result = simulate(raw | {"parallel": parallel | values(advice.rpartition(" (")[0])})
        assert result.memory_bytes / 1e9 == pytest.approx(gigabytes, abs=0.06)
        assert result.num_gpus == 8 * parallel.get("tensor", 1) // (
            1 if "fsdp" in parallel or parallel["data"] == 8 else 2
        )


@pytest.mark.parametrize("parallel", [{"fsdp": 8, "micro_batch": 8}, {"data": 8, "zero_stage": 3, "micro_batch": 8}])
def test_advice_for_a_job_that_names_no_batch_says_what_keeps_it(parallel: dict[str, Any]) -> None:
    """`micro_batch = 4` alone would train half as many sequences, and hold less than what is told."""
    raw = job(parallel, "llama-2-7b", seq_len=8192)
    found = FITS.search(refusal(raw))
    assert found is not None
    told = [one for one in found[1].split("; or ") if "micro_batch" in one]
    assert told
    for advice in told:
        assert "global_batch = 64" in advice
        gigabytes = float(advice.rpartition("(")[2].removesuffix(" GB)"))
        result = simulate(raw | {"parallel": parallel | values(advice.rpartition(" (")[0])})
        assert result.memory_bytes / 1e9 == pytest.approx(gigabytes, abs=0.06)


def test_two_ranks_that_share_out_are_not_told_to_be_one() -> None:
    """No job file has fsdp = 1, which tensor parallelism in its place would leave."""
    message = refusal(job({"fsdp": 2, "zero_stage": 2, "recompute": "full", "global_batch": 8}, "llama-3-8b"))
    assert message.endswith("it fits with zero_stage = 3 (80.3 GB)")


def test_a_job_that_needs_more_gpus_is_told_so() -> None:
    """ZeRO-3 over 8 GPUs with every layer recomputed: 70 B parameters take 16 bytes each, 140 GB a GPU."""
    message = refusal(job({"fsdp": 8, "recompute": "full"}, "llama-3-70b"))
    assert message.endswith(("use more of them", "use more GPUs too"))
    assert "it fits" not in message


def test_recomputation_that_frees_nothing_is_said() -> None:
    words = 'parallel.recompute = "selective" with flash attention'

    def notes(**keys: Any) -> str:
        parallel = {"data": 8, "tensor": 2, "zero_stage": 1, "global_batch": 16, "recompute": "selective"} | keys
        return "\n".join(simulate(job(parallel, "llama-2-7b")).notes)

    assert words in notes()
    assert "selective" not in notes(recompute_modules=["mlp"])
    assert "selective" not in notes(flash_attention=False)
    assert "of core_attn frees no memory" in notes(recompute_modules=["core_attn"])
    assert "selective" not in notes(recompute="full")
