"""Whether a change is worth it: verdicts by hand, and two jobs that others measured to gain nothing."""

import io
import tomllib
from typing import Any

import pytest
from rich.console import Console

import lagom_overlap
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.planners.effects import MIN_GAIN
from lagom_overlap.report.what_if import what_if_parts
from lagom_overlap.sim.what_if import (
    LEAST,
    AskedChange,
    GainEstimate,
    Spent,
    WhatIf,
    error_s,
    interval_text,
    what_if,
    whether,
)
from lagom_overlap.units import format_memory, format_percent
from lagom_overlap.verbs.plan_fsdp2 import key_notes
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate
from lagom_overlap.verbs.simulate_what_if import simulated_what_ifs
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings

BEFORE = Spent(step_s=1.0, overlapped_s=0.2, exposed_s=0.1)
ERROR_S = 0.033 * 0.2 + 0.087 * 0.1


def asked(after_s: float) -> WhatIf:
    return what_if(AskedChange("x", "y"), BEFORE, Spent(step_s=after_s, overlapped_s=0.2, exposed_s=0.1))


@pytest.mark.parametrize(
    ("after_s", "verdict"),
    [
        (0.98, GainEstimate.GAIN),
        (0.99, GainEstimate.WITHIN_ERROR),
        (0.997, GainEstimate.NO_GAIN),
        (1.0, GainEstimate.NO_GAIN),
        (1.003, GainEstimate.NO_GAIN),
        (1.01, GainEstimate.WITHIN_ERROR),
        (1.02, GainEstimate.LOSS),
    ],
)
def test_a_verdict_needs_more_than_the_models_error_and_more_than_steps_differ_by(
    after_s: float, verdict: GainEstimate
) -> None:
    found = asked(after_s)
    assert found.verdict is verdict
    assert (found.low_s, found.high_s) == pytest.approx((1.0 - after_s - ERROR_S, 1.0 - after_s + ERROR_S))


def test_the_error_counts_the_longer_overlap_and_the_larger_exposure() -> None:
    after = Spent(step_s=1.0, overlapped_s=0.5, exposed_s=0.0)
    assert error_s(BEFORE, after) == error_s(after, BEFORE) == pytest.approx(0.033 * 0.5 + 0.087 * 0.1)


def test_the_sentence_names_a_gain_and_says_no_where_there_is_none() -> None:
    assert whether([]) == ""
    assert whether([asked(1.0), asked(0.9)]).startswith("Worth trying: x, +10.0 % of the step")
    assert whether([asked(0.99)]).startswith("No gain that the model can tell from its own error")
    assert whether([asked(1.02), asked(1.0)]).startswith('No change is predicted to pay: the best of 2 changes, "x", ')
    assert interval_text(asked(0.9)) == "+8.5 % to +11.5 %"


def channel_answers(model: str, seq_len: int, nodes: int, parallel: dict[str, object]) -> list[WhatIf]:
    job = {
        "job": {"name": "null"},
        "model": {"name": model, "seq_len": seq_len},
        "cluster": {"preset": "h200", "nodes": nodes},
        "parallel": parallel,
    }
    result = run_simulate(SimulateRequest(job=Job(parse_job(job, "job.toml"))))
    answers = [answer for answer in result.what_ifs if "channels" in answer.change]
    assert not any(answer.verdict is GainEstimate.GAIN for answer in answers)
    assert whether(answers).startswith(("No gain", "No change"))
    return answers


def test_capping_channels_gains_nothing_on_a_mixture_of_experts_over_32_h200() -> None:
    # Measured by others: 151.7 TFLOP/s untouched, 148.5, 150.3, 152.2 with 8, 16, 32 channels (model not published).
    parallel: dict[str, object] = {"data": 32, "expert": 32, "micro_batch": 2, "global_batch": 64, "zero_stage": 1}
    assert channel_answers("qwen3-30b-a3b", 4096, 4, parallel)


def test_capping_channels_gains_nothing_over_336_h200() -> None:
    # Measured by others: 57.8k, 56.5k, 56.2k tokens/s with all, 8, 2 channels (model not published).
    answers = channel_answers("llama-3-8b", 8192, 42, {"fsdp": 336, "recompute": "full"})
    assert {answer.change for answer in answers} >= {"at most 8 channels", "at most 2 channels"}


def test_a_flag_that_hides_what_shows_is_a_gain() -> None:
    parallel = {"tensor": 8, "data": 2, "global_batch": 8, "sequence_parallel": True, "overlap_gradients": False}
    job = {
        "job": {"name": "tp"},
        "model": {"name": "llama-2-7b", "seq_len": 2048},
        "cluster": {"preset": "a100_dgx", "nodes": 2},
        "parallel": parallel,
    }
    result = run_simulate(SimulateRequest(job=Job(parse_job(job, "job.toml"))))
    gains = {answer.change: answer for answer in result.what_ifs if answer.verdict is GainEstimate.GAIN}
    assert "tensor parallelism in parts" in gains
    other = parse_job(job | {"parallel": parallel | {"overlap_tensor": True}}, "job.toml")
    switched = run_simulate(SimulateRequest(job=Job(other)))
    predicted_s = result.iteration_s - gains["tensor parallelism in parts"].gain_s
    assert switched.iteration_s == pytest.approx(predicted_s)
    assert all(abs(a.share) < LEAST for a in result.what_ifs if a.verdict is GainEstimate.NO_GAIN)


def test_parameters_are_asked_for_behind_forward_where_megatron_can_gather_them_so() -> None:
    def asked(**keys: object) -> set[str]:
        raw = {
            "job": {"name": "dp"},
            "model": {"name": "llama-3.2-1b", "seq_len": 2048},
            "cluster": {"preset": "h100_dgx"},
            "parallel": {"data": 8, "global_batch": 8, "zero_stage": 1, "overlap_gradients": True} | keys,
        }
        return {
            answer.setting for answer in run_simulate(SimulateRequest(job=Job(parse_job(raw, "job.toml")))).what_ifs
        }

    parameters, gradients = "[parallel] overlap_parameters = true", "[parallel] overlap_gradients = true"
    assert parameters in asked()
    assert parameters not in asked(overlap_parameters=True)
    assert parameters not in asked(overlap_gradients=False)  # Megatron-LM refuses one without the other
    assert gradients in asked(overlap_gradients=False)
    assert not {parameters, gradients} & asked(frozen=True, zero_stage=0, overlap_gradients=False)


def test_parameters_kept_after_forward_gain_what_the_planner_of_fsdp2_predicts() -> None:
    """The planner runs FSDP2's hooks again on the recorded step; the question builds another step, under ZeRO 2."""
    raw = {
        "job": {"name": "kept"},
        "model": {"name": "llama-2-7b", "seq_len": 2048},
        "cluster": {"preset": "h100_dgx", "nodes": 8},
        "parallel": {"fsdp": 64},
    }
    result = run_simulate(SimulateRequest(job=Job(parse_job(raw, "job.toml"))))
    found = next(answer for answer in result.what_ifs if answer.setting == "[parallel] zero_stage = 2")
    planned = lagom_overlap.plan(parse_job(raw, "job.toml"), carrier="fsdp2")
    assert planned.fsdp2 is not None
    kept = next(switch for switch in planned.fsdp2.switches if "reshard_after_forward" in switch.switch)
    assert found.gain_s == pytest.approx(kept.without_s - kept.with_s, rel=1e-9)
    assert result.iteration_s == pytest.approx(kept.without_s, rel=1e-9)
    assert found.verdict is GainEstimate.GAIN
    assert "GB per GPU" in found.change
    assert found.apply.startswith("fully_shard(..., reshard_after_forward=False)")
    same = parse_job(raw | {"parallel": {"fsdp": 64, "zero_stage": 2}}, "job.toml")
    changed = run_simulate(SimulateRequest(job=Job(same)))
    assert changed.iteration_s == pytest.approx(result.iteration_s - found.gain_s, rel=1e-12)
    assert f"({format_memory(changed.memory_bytes)} per GPU)" in found.change


def test_a_job_that_keeps_some_units_is_simulated_and_may_keep_all() -> None:
    """No layout has both keys: what keeps all of them says that none are kept apart from the rest."""
    raw: dict[str, Any] = {
        "job": {"name": "some"},
        "model": {"name": "llama-3.2-1b", "seq_len": 1024},
        "cluster": {"preset": "h100_dgx"},
        "parallel": {"fsdp": 8, "kept_units": 2},
    }
    result = run_simulate(SimulateRequest(job=Job(parse_job(raw, "job.toml"))))
    found = next(answer for answer in result.what_ifs if "zero_stage" in answer.setting)
    assert found.setting == "[parallel] zero_stage = 2, kept_units = 0"
    raw["parallel"] |= {"zero_stage": 2, "kept_units": 0}
    changed = Job(parse_job(raw, "job.toml")).step
    assert changed is not None
    assert changed.times.iteration_s == pytest.approx(result.iteration_s - found.gain_s, rel=1e-12)


FSDP2_KEYS = {"zero_stage", "forward_prefetch", "backward_prefetch", "reduce_buffers", "separate_reduce_group"}
MIXTURE = {"data": 8, "expert": 8, "global_batch": 16, "tensor": 2}


@pytest.mark.parametrize(
    ("framework", "stage", "offered"),
    [
        ("megatron", 1, {"overlap_experts", "dispatcher", "overlap_tensor", "overlap_gradients"}),
        ("torchtitan", 3, {"dispatcher", *FSDP2_KEYS}),
        ("fsdp2", 3, FSDP2_KEYS),
        ("deepspeed", 3, {"prefetch"}),
    ],
)
def test_no_flag_is_offered_that_the_framework_lacks(framework: str, stage: int, offered: set[str]) -> None:
    raw = {
        "job": {"name": "toy"},
        "model": {"name": "mixtral-8x7b", "seq_len": 4096},
        "cluster": {"preset": "gb200"},
        "parallel": MIXTURE
        | {"framework": framework, "zero_stage": stage, "sequence_parallel": framework == "megatron"},
    }
    answers = run_simulate(SimulateRequest(job=Job(parse_job(raw, "job.toml")))).what_ifs
    keys = {answer.setting.split()[1] for answer in answers if answer.setting.startswith("[parallel] ")}
    assert keys == offered
    for answer in answers:  # what is offered is a job file that is taken
        if answer.setting.startswith("[parallel] "):
            key, value = answer.setting.removeprefix("[parallel] ").split(" = ")
            parallel = raw["parallel"] | {key: tomllib.loads(f"x = {value}")["x"]}  # type: ignore[operator]
            assert Job(parse_job(raw | {"parallel": parallel}, "job.toml")).step is not None


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("olmoe-1b-7b", {"data": 8, "expert": 8, "framework": "torchtitan", "zero_stage": 3}),
        ("llama-3.2-1b", {"data": 8, "framework": "ddp", "overlap_gradients": False}),
        ("llama-3.2-1b", {"fsdp": 8}),
    ],
)
def test_what_simulate_suggests_a_plan_tries_or_names_with_the_same_figure(
    model: str, parallel: dict[str, Any]
) -> None:
    """Keys that are no settings of FSDP2's (dispatchers, parts of tensor parallelism, DDP's overlap)."""
    raw = {
        "job": {"name": "toy"},
        "model": {"name": model, "seq_len": 2048},
        "cluster": {"preset": "gb200"},
        "parallel": parallel,
    }
    job = Job(parse_job(raw, "job.toml"))
    assert job.step is not None
    is_fsdp2 = "fsdp" in parallel or parallel["framework"] == "torchtitan"
    settings = Fsdp2Settings(units=("layer",)) if is_fsdp2 else None
    said = " ".join(key_notes(job.step, settings))
    tried = set() if settings is None else {*settings.keys()}
    suggested = [answer for answer in simulated_what_ifs(job.step) if answer.setting.startswith("[parallel] ")]
    assert suggested
    for answer in suggested:
        key, value = answer.setting.removeprefix("[parallel] ").split(" = ")
        named = f"--set parallel.{key}={value.strip(chr(34))} "
        assert (named in said) is (key not in tried and answer.share > MIN_GAIN)
        if named in said:
            assert f"{format_percent(answer.share)} off the iteration" in said.split(named)[1]


@pytest.mark.parametrize("width", [60, 80])
def test_a_terminal_shows_what_one_would_set(width: int) -> None:
    asked = AskedChange("gradients reduced during the last backward", "--x; y", "[parallel] overlap_gradients = true")
    answer = what_if(asked, BEFORE, Spent(step_s=1.0004, overlapped_s=0.2, exposed_s=0.1))
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*what_if_parts([answer], has_job=True))
    text = console.export_text()
    assert "[parallel] overlap_gradients = true" in " ".join(text.split())
    assert "-0.0 %" not in text
    assert max(map(len, text.splitlines())) <= width
