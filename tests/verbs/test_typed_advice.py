"""Random jobs: every line that plan advises, typed as `--set`, is accepted and takes the time that was said.

Dense models and mixtures; FSDP2, FSDP1, torchtitan, DDP, DeepSpeed, Megatron-LM; hybrid sharding, tensor, context and
pipeline parallelism; several clusters. 300 of them agreed on 2026-11-29; a few of each framework stay.
"""

import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lagom_overlap.errors import LagomError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.memory import check_memory
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.jobfile.variants import JobVariants
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.results.plan import PlanResult
from lagom_overlap.toml_tables import toml_value
from lagom_overlap.verbs.plan import PlanRequest, run_plan
from lagom_overlap.verbs.plan_problem import read_input

Raw = dict[str, dict[str, Any]]
SHARDED = ("fsdp2", "fsdp1", "torchtitan", "torchtitan_compiled")
KEY = re.compile(r"Not of this plan, but a key of the job: --set (.*) \(.*\) takes (.*) off the iteration")


def generated(framework: str, seed: int) -> Raw:
    """Some job of a framework's, which may be refused."""
    dice = Random(f"{framework} {seed}")
    is_mixture = dice.random() < 0.3
    model = "olmoe-1b-7b" if is_mixture else dice.choice(("llama-3.2-1b", "phi-2", "llama-3.2-3b", "qwen3-4b"))
    data, tensor, pipeline = dice.choice((2, 4, 8)), dice.choice((1, 1, 2)), dice.choice((1, 1, 2, 4))
    if framework in ("ddp", "fsdp1"):
        tensor = pipeline = 1
    parallel: dict[str, Any] = {"framework": framework, "tensor": tensor, "pipeline": pipeline}
    parallel["sequence_parallel"] = tensor > 1 and (is_mixture or dice.random() < 0.5)
    if framework in SHARDED:
        parallel |= {"fsdp": data} if dice.random() < 0.7 else {"data": data, "zero_stage": dice.choice((2, 3))}
        if "fsdp" in parallel and not is_mixture and dice.random() < 0.2:
            parallel["replicate"] = 2
            data *= 2
        for key, values in {"kept_units": (1, 5), "reduce_buffers": (2, 4), "forward_prefetch": (1, 2)}.items():
            if pipeline == 1 and framework != "fsdp1" and dice.random() < 0.25:
                parallel[key] = dice.choice(values)
    else:
        parallel |= {"data": data, "zero_stage": 0 if framework == "ddp" else dice.choice((0, 1))}
    batches = dice.choice((1, 2, 4)) * pipeline
    parallel["global_batch"] = data * batches
    if pipeline > 1 and dice.random() < 0.5:
        parallel |= {"schedule": "interleaved", "chunks": 2, "overlap_p2p": dice.random() < 0.5}
        if framework == "megatron" and dice.random() < 0.5:
            parallel["micro_batch_group"] = batches
    if is_mixture and dice.random() < 0.8:
        parallel["expert"] = 2
    if dice.random() < 0.4:
        parallel["recompute"] = dice.choice(("full", "selective"))
    return {
        "job": {"name": "one"},
        "model": {"name": model, "seq_len": dice.choice((512, 1024, 2048, 4096))},
        "cluster": {"preset": dice.choice(("a100_dgx", "h100_dgx", "a40_nvlink", "h200", "b200"))},
        "parallel": parallel,
    }


def typed(job: Raw, *sets: str) -> JobStep:
    """The job with `--set`, one or more in a line."""
    step = Job(
        JobVariants.of(job, "job.toml", Path(), [one for line in sets for one in line.split(" --set ")]).one()
    ).step
    assert step is not None
    return step


def planned(job: Raw) -> PlanResult:
    given = read_input(JobVariants.of(job, "job.toml", Path()).one())
    return run_plan(replace(given, problem=replace(given.problem, work=SearchBudget(0.3))), PlanRequest())


@pytest.mark.parametrize("framework", ["fsdp2", "torchtitan", "fsdp1", "ddp", "deepspeed", "megatron"])
def test_what_plan_advises_is_accepted_and_takes_what_it_says(framework: str) -> None:
    num_planned, seed = 0, 0
    while num_planned < 2:
        seed += 1
        job = generated(framework, seed)
        try:
            check_memory(typed(job))
            result = planned(job)
        except LagomError:
            continue
        num_planned += 1
        said: list[tuple[tuple[str, ...], float | None]] = []
        advised: tuple[str, ...] = ()
        if result.fsdp2 is not None:
            advised = tuple(one.key for one in result.fsdp2.switches)
            said += [((*advised, one.key), one.with_s) for one in result.fsdp2.not_advised]
        if result.megatron is not None:
            advised = _sets(result.megatron.changes)
            for one in result.megatron.switches:
                said += [(_sets(one.with_keys), one.with_s), (_sets(one.without_keys), one.without_s)]
        if result.fsdp2 is not None or result.megatron is not None:  # others plan one stage's step
            said += [((), result.iteration_s.before), (advised, result.iteration_s.after)]
        for sets, said_s in said:
            if said_s is not None:
                assert typed(job, *sets).times.iteration_s == pytest.approx(said_s, rel=1e-9), (job, sets)
        for sets, gain in (found.groups() for note in result.notes if (found := KEY.match(note))):
            before, after = (typed(job, *advised, *more).times.iteration_s for more in ((), (sets,)))
            assert f"{100 * (1 - after / before):.1f} %" == gain, (job, sets)


def _sets(keys: Any) -> tuple[str, ...]:
    return tuple(f"parallel.{key}={toml_value(value)}" for key, value in keys.items())
