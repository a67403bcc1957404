"""Megatron-LM's switches: every figure is `lagom simulate`'s of the job with the keys typed by hand."""

import json
import random
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lagom_overlap.errors import JobError
from lagom_overlap.export.tp_overlap import tp_overlap_yaml
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.megatron.settings import MegatronSettings, environment
from lagom_overlap.planners.megatron.switch_search import SwitchContext, SwitchEffect, SwitchVerdict, considered
from lagom_overlap.results.plan import MegatronEffects, PlanResult
from lagom_overlap.results.simulate import SimulateResult
from lagom_overlap.sim.what_if import LEAST
from lagom_overlap.verbs.plan import PlanRequest, run_plan
from lagom_overlap.verbs.plan import planned as planned_by
from lagom_overlap.verbs.plan_megatron import NOTHING_GAINS, PLAIN_PIPELINE, UNTRIED, megatron_plan
from lagom_overlap.verbs.plan_problem import PlanInput, read_input
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate
from lagom_overlap.verbs.simulate_what_if import switched_layouts
from lagom_overlap.workload.parallel import ParallelLayout
from lagom_overlap.workload.precision import Precision, ProductFormat
from lagom_overlap.workload.step.framework_file import can_overlap_experts

EXAMPLES = [
    path for path in sorted(Path("examples").glob("*.toml")) if "megatron" in path.name or "gpt_175b" in path.name
]
Raw = dict[str, dict[str, Any]]


def raw(model: str, preset: str, seq_len: int = 1024, **parallel: object) -> Raw:
    return {
        "job": {"name": "one"},
        "model": {"name": model, "seq_len": seq_len},
        "cluster": {"preset": preset},
        "parallel": parallel,
    }


SMALL = "llama-3.2-1b"
"""16 layers, which every number of stages and chunks here divides."""
PHI: Mapping[str, Any] = {"tensor": 2, "data": 2, "zero_stage": 1, "global_batch": 8}
MIXTURE: Mapping[str, Any] = {"pipeline": 4, "data": 8, "expert": 8, "zero_stage": 1, "global_batch": 64}
JOBS: Mapping[str, Raw] = {
    "phi": raw("phi-2", "a100_dgx", **PHI),
    "phi_in_a_pipeline": raw("phi-2", "a100_dgx", **PHI, pipeline=4, sequence_parallel=True),
    "mixture": raw("mixtral-8x7b", "h100_dgx", 2048, **MIXTURE),
    "mixture_interleaved": raw(
        "mixtral-8x7b", "h100_dgx", 2048, **MIXTURE, schedule="interleaved", chunks=4, overlap_p2p=True
    ),
    "sharded": raw("llama-3-8b", "h100_dgx", 4096, data=8, zero_stage=3, global_batch=16),
    "deepspeed": raw("phi-2", "a100_dgx", **PHI, framework="megatron_deepspeed"),
    "uneven": raw(  # 94 layers: 12 a stage with the tables, and 11 on the first and the last
        "qwen3-235b-a22b", "h100_dgx", 2048, pipeline=8, data=8, expert=8, tables_as_layers=True, zero_stage=1,
        global_batch=64, recompute="full",
    ),
}  # fmt: skip


def generated(seed: int) -> Raw:
    """Some job of Megatron-LM that fits."""
    dice = random.Random(seed)
    pipeline, tensor = dice.choice((1, 2, 4)), dice.choice((1, 2))
    data = dice.choice((2, 4))
    parallel: dict[str, Any] = {
        "pipeline": pipeline, "tensor": tensor, "data": data, "zero_stage": dice.choice((0, 1)),
        "global_batch": data * pipeline * dice.choice((2, 3)), "sequence_parallel": tensor > 1 and dice.random() < 0.5,
    }  # fmt: skip
    if pipeline > 1 and dice.random() < 0.5:
        parallel |= {"schedule": "interleaved", "chunks": dice.choice((2, 4)), "overlap_p2p": dice.random() < 0.5}
    if dice.random() < 0.5:
        parallel |= {"overlap_gradients": True, "overlap_parameters": parallel["zero_stage"] == 1}
    return raw(SMALL, dice.choice(("a100_dgx", "h100_dgx")), dice.choice((512, 1024)), **parallel)


LARGE = ("phi_in_a_pipeline", "mixture_interleaved", "uneven")
LONG_SEEDS = (0, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 17)
"""Of those that stay, 4 overlaps under tensor parallelism and 19 is interleaved."""


def marked(*, is_long: bool) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.long,) if is_long else ()


def given(job: Raw) -> PlanInput:
    found = read_input(parse_job(job, "job.toml"))
    return replace(found, problem=replace(found.problem, budget_s=1e3))


def planned(job: Raw, **asked: Any) -> PlanResult:
    return run_plan(given(job), PlanRequest(**asked)) if asked else _planned(json.dumps(job))


@cache
def _planned(job: str) -> PlanResult:
    """The plan of a job that several tests look at."""
    return run_plan(given(json.loads(job)), PlanRequest())


def effects_of(job: Raw) -> MegatronEffects:
    found = planned(job).megatron
    assert found is not None
    return found


def typed(job: Raw, keys: Mapping[str, object]) -> SimulateResult:
    """`lagom simulate` of the job with keys of [parallel] typed by hand."""
    return run_simulate(SimulateRequest(job=typed_job(job, keys)))


def typed_job(job: Raw, keys: Mapping[str, object]) -> Job:
    """The job with keys of [parallel] typed by hand."""
    return Job(parse_job({**job, "parallel": {**job["parallel"], **keys}}, "job.toml"))


def told(job: Raw, keys: Mapping[str, object]) -> tuple[float, int]:
    """Seconds and bytes of `typed`, without its suggestions, which take as long as a plan."""
    step = typed_job(job, keys).step
    assert step is not None
    return step.times.iteration_s, step.most_bytes


def row(effects: MegatronEffects, switch: str) -> SwitchEffect:
    return next(one for one in effects.switches if one.switch.startswith(switch))


@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        *(pytest.param(tomllib.loads(path.read_text()), id=path.stem, marks=pytest.mark.long) for path in EXAMPLES),
        *(pytest.param(job, id=name, marks=marked(is_long=name in LARGE)) for name, job in JOBS.items()),
        *(
            pytest.param(generated(seed), id=f"generated {seed}", marks=marked(is_long=seed in LONG_SEEDS))
            for seed in range(20)
        ),
    ],
)
def test_before_after_and_every_line_are_simulates_figures_of_the_job_with_these_keys(job: Raw) -> None:
    result = planned(job)
    effects = result.megatron
    assert effects is not None

    @cache
    def simulated(**keys: object) -> tuple[float, int]:
        return told(job, keys)

    before, after = simulated(), simulated(**effects.changes)
    assert (result.iteration_s.before, result.peak_memory_bytes.before) == before
    assert (result.iteration_s.after, result.peak_memory_bytes.after) == after
    if job["model"]["name"] != SMALL:  # what `run_simulate` tells with its suggestions takes as long as the plan
        said = typed(job, effects.changes)
        assert (said.iteration_s, said.memory_bytes, said.memory_limit_bytes) == (
            *after,
            result.peak_memory_bytes.limit,
        )
    assert effects.switches or job["parallel"]["zero_stage"] == 3  # Megatron-FSDP overlaps all it has
    for one in effects.switches:
        if one.with_s is not None:
            assert (one.with_s, one.memory_bytes) == simulated(**one.with_keys), one.switch
        if one.without_s is not None:
            assert one.without_s == simulated(**one.without_keys)[0], one.switch


def test_a_job_that_says_nothing_has_megatrons_defaults(tmp_path: Path) -> None:
    """`--overlap-grad-reduce` is off by default; the headline is against that, and the file switches it on."""
    job = {**JOBS["phi"], "parallel": {**PHI, "sequence_parallel": True}}
    assert told(job, {}) == told(job, {"overlap_gradients": False})
    result = planned(job, out=tmp_path / "run")
    assert result.baseline == "Megatron-LM's defaults"
    assert result.megatron is not None
    assert result.megatron.default_s > result.iteration_s.after
    assert row(result.megatron, "--overlap-grad-reduce").by_default is False
    assert "--overlap-grad-reduce" in result.megatron.arguments


def test_the_bucket_of_a_job_that_says_nothing_is_megatrons_rule() -> None:
    """The larger of 40 million gradients and a million per data-parallel rank."""
    step = Job(parse_job(raw("phi-2", "h100_dgx", data=64, zero_stage=1), "job.toml")).step
    assert step is not None
    assert step.layout.bucket_bytes == 4 * 64_000_000


@pytest.mark.parametrize("name", ["phi", "sharded", "mixture"])
def test_the_argument_file_is_always_written_and_whole(tmp_path: Path, name: str) -> None:
    first = planned(JOBS[name])
    assert first.megatron is not None
    as_advised = {**JOBS[name], "parallel": {**JOBS[name]["parallel"], **first.megatron.changes}}
    again = planned(as_advised, out=tmp_path / "run")
    assert NOTHING_GAINS in again.notes
    assert again.megatron is not None
    assert again.megatron.arguments == first.megatron.arguments
    written = (tmp_path / "run" / "megatron_args.sh").read_text()
    assert f'MEGATRON_OVERLAP_ARGS="{" ".join(again.megatron.arguments)}' in written
    for one in again.megatron.switches:
        assert f"{one.switch}: {one.verdict}" in written
    for missing in again.megatron.not_modelled:
        assert f"not modelled: {missing.argument}: {missing.why}" in written


def test_what_simulate_suggests_plan_considers() -> None:
    for name, job in JOBS.items():
        step = Job(parse_job(job, "job.toml")).step
        assert step is not None
        context = SwitchContext(model=step.model, rules=step.rules, precision=step.precision, gpu=step.cluster.gpu)
        tried = {_switches(layout) for layout in considered(step.layout, context)}
        for _, _, keys in switched_layouts(step):
            assert _switches(replace(step.layout, **keys)) in tried, (name, keys)


@pytest.mark.parametrize("name", ["phi", "mixture", "deepspeed"])
def test_what_plan_advises_simulate_asks_or_names(name: str) -> None:
    job = JOBS[name]
    step, said = typed_job(job, {}).step, typed(job, {})
    assert step is not None
    named = next((note for note in said.notes if note.startswith("lagom plan also tries other values of ")), "")
    asked = {key for _, _, keys in switched_layouts(step) for key in keys}
    for key in effects_of(job).changes:
        assert (key in asked) is not (f"parallel.{key}" in re.findall(r"parallel\.\w+", named)), key


def _switches(layout: ParallelLayout) -> MegatronSettings:
    return MegatronSettings.of(layout)


def test_a_dispatcher_that_simulate_finds_to_gain_is_advised() -> None:
    job = tomllib.loads(Path("examples/qwen3_30b_moe_megatron_h100.toml").read_text())
    effects = effects_of(job)
    assert effects.settings.dispatcher == "merged"
    assert any(one.startswith("--moe-token-dispatcher-type flex") for one in effects.arguments)


@pytest.mark.slow
def test_no_advice_exceeds_the_gpu_on_any_stage_and_the_peak_is_the_advised_one() -> None:
    """One layer a chunk of 70B holds 159 chunks' activations with groups of 16 micro-batches: more than 80 GB."""
    job = raw(
        "llama-3-70b", "h100_dgx", 10240, tensor=8, pipeline=4, data=2, sequence_parallel=True, zero_stage=1,
        global_batch=32,
    )  # fmt: skip
    result = planned(job)
    effects = result.megatron
    assert effects is not None
    assert result.peak_memory_bytes.after == told(job, effects.changes)[1] > result.peak_memory_bytes.before
    assert result.peak_memory_bytes.after <= load_preset("h100_dgx").gpu.memory_bytes
    large = [one for one in effects.switches if one.verdict is SwitchVerdict.TOO_LARGE]
    assert large
    assert not any(one.advised for one in large)
    for one in large[:1]:
        with pytest.raises(JobError, match="needs"):
            typed(job, one.with_keys)


def test_a_memory_limit_of_the_plan_bounds_the_advice() -> None:
    job = JOBS["mixture"]
    free = planned(job)
    limit = free.peak_memory_bytes.before
    assert free.peak_memory_bytes.after > limit  # interleaving holds more
    bounded = planned({**job, "plan": {"memory_limit": limit}})
    assert bounded.peak_memory_bytes.after <= limit
    assert bounded.peak_memory_bytes.limit == limit


def test_interleaving_is_asked_with_every_divisor_against_what_the_job_has() -> None:
    """Stages of 8 layers in 2 chunks: 4 and 8 are asked."""
    interleaved = {"schedule": "interleaved", "chunks": 2, "overlap_p2p": True}
    job = raw(SMALL, "h100_dgx", pipeline=2, data=2, zero_stage=1, global_batch=8, **interleaved)
    effects = effects_of(job)
    asked = {one.switch for one in effects.switches if "virtual-stages" in one.switch}
    assert asked == {f"--num-virtual-stages-per-pipeline-rank {chunks}" for chunks in (4, 8)}
    (without_s,) = {one.without_s for one in effects.switches if one.switch in asked}
    others = {key: value for key, value in effects.changes.items() if key not in ("schedule", "chunks", "overlap_p2p")}
    assert without_s == told(job, others)[0]  # with the two that it has


def test_uneven_layers_are_interleaved_by_their_tables_too() -> None:
    """94 layers and two tables on eight stages are 12 a stage: in chunks of 6, 4, 3 and 2; of 1 an end has none."""
    effects = effects_of(JOBS["uneven"])
    asked = {one.switch.split()[1] for one in effects.switches if "virtual-stages" in one.switch}
    assert asked == {"2", "3", "4", "6"}
    assert "--account-for-embedding-in-pipeline-split" in effects.arguments


@pytest.mark.parametrize("name", ["phi", pytest.param("mixture", marks=pytest.mark.long)])
def test_what_the_job_switched_on_is_not_switched_off_within_the_models_error(name: str) -> None:
    job = {
        **JOBS[name],
        "parallel": {**JOBS[name]["parallel"], "overlap_gradients": True, "overlap_parameters": True},
    }
    effects = effects_of(job)
    for one in effects.switches:
        if one.in_job and not one.advised and "virtual-stages" not in one.switch:
            assert one.high is not None
            assert one.high < -LEAST, one.switch


def environment_of(job: Raw) -> dict[str, str]:
    return {rule.variable: rule.value for rule in effects_of(job).environment}


def test_the_environment_is_what_megatron_asserts() -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert environment_of(raw("llama-3-8b", "h100_dgx", 4096, context=4, data=2, zero_stage=1)) == {name: "1"}
    assert environment_of(raw("llama-3-8b", "h100_dgx", 4096, tensor=4, data=2, zero_stage=1)) == {name: "1"}
    assert environment_of(raw("llama-3-8b", "b200", 4096, tensor=4, data=2, zero_stage=1)) == {name: "32"}
    assert environment_of(JOBS["sharded"]) == {name: ""}
    assert environment_of(tomllib.loads(Path("examples/qwen3_30b_moe_megatron_h100.toml").read_text())) == {name: "32"}


def test_data_parallelism_alone_says_what_the_environment_must_not_be(tmp_path: Path) -> None:
    result = planned(raw("llama-3-8b", "h100_dgx", 4096, data=8, zero_stage=1), out=tmp_path / "run")
    assert "1 means no overlap" in "\n".join(result.advice["Megatron-LM"])
    written = (tmp_path / "run" / "megatron_args.sh").read_text()
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in written


def test_the_first_row_of_the_environment_that_holds_counts() -> None:
    gpu = load_preset("h100_dgx").gpu
    layout = ParallelLayout(tensor=2, data=4, expert=4, global_batch=8, overlap_experts=True)
    assert [rule.value for rule in environment("megatron", layout, gpu)] == ["32"]
    assert [rule.value for rule in environment("megatron", replace(layout, zero_stage=3), gpu)] == [""]
    assert environment("megatron", ParallelLayout(), gpu) == ()


@pytest.mark.parametrize(
    ("preset", "hidden", "products", "proj", "fc2"),
    [
        ("h100_dgx", 8192, ProductFormat.PARAMETER, 24, 16),
        ("h100_dgx", 5120, ProductFormat.PARAMETER, 16, 24),
        ("h100_dgx", 16384, ProductFormat.PARAMETER, 24, 8),
        ("h100_dgx", 8192, ProductFormat.FP8, 0, 0),
        ("b200", 8192, ProductFormat.PARAMETER, 32, 16),
    ],
)
def test_user_buffers_have_nvidias_own_numbers(
    preset: str, hidden: int, products: ProductFormat, proj: int, fc2: int
) -> None:
    text = tp_overlap_yaml("megatron", load_preset(preset).gpu, hidden, Precision(products=products)).decode()
    for name, num_sms in (("proj_fprop", proj), ("fc2_fprop", fc2)):
        pipelined = f"  method: pipeline\n  num_sm: {num_sms}\n  cga_size: 2\n  num_splits: 4\n  set_sm_margin: 1\n"
        ring = "  method: ring_exchange\n  num_sm: 1\n  set_sm_margin: 1\n"
        assert f"{name}:\n{pipelined if num_sms else ring}" in text
    products_of = [line.removesuffix(":") for line in text.splitlines() if line.endswith(":")]
    assert sorted(products_of) == sorted(
        f"{layer}_{phase}" for layer in ("qkv", "proj", "fc1", "fc2") for phase in ("fprop", "dgrad", "wgrad")
        if (layer, phase) not in (("proj", "wgrad"), ("fc2", "wgrad"))
    )  # fmt: skip


def test_a_plan_with_tp_comm_overlap_names_its_file(tmp_path: Path) -> None:
    job = raw("llama-3-8b", "h100_dgx", 4096, tensor=8, sequence_parallel=True, global_batch=2)
    result = planned(job, out=tmp_path / "run")
    assert result.megatron is not None
    assert "--tp-comm-overlap" in result.megatron.arguments
    assert "--tp-comm-overlap-cfg tp_comm_overlap.yaml" in (tmp_path / "run" / "megatron_args.sh").read_text()
    assert "num_sm: 24" in (tmp_path / "run" / "tp_comm_overlap.yaml").read_text()


def test_an_applied_plan_is_the_advised_one_and_may_be_edited(tmp_path: Path) -> None:
    job = raw(SMALL, "a100_dgx", data=2, zero_stage=1, global_batch=4)
    result = planned(job, out=tmp_path / "run")
    plan = tmp_path / "run" / "plan.toml"
    applied = planned(job, apply=plan)
    assert result.megatron is not None
    assert applied.megatron is not None
    assert applied.iteration_s == result.iteration_s
    assert applied.megatron.arguments == result.megatron.arguments
    text = plan.read_text()
    assert "overlap_gradients = true" in text
    edited = text.replace("overlap_gradients = true", "overlap_gradients = false")
    plan.write_text(edited.replace("overlap_parameters = true", "overlap_parameters = false"))
    changed = {**result.megatron.changes, "overlap_gradients": False, "overlap_parameters": False}
    assert planned(job, apply=plan).iteration_s.after == told(job, changed)[0]
    plan.write_text(edited)
    with pytest.raises(JobError, match="overlap_parameters needs"):
        planned(job, apply=plan)
    plan.write_text(text.replace("overlap_gradients =", "overlap_gradient ="))
    with pytest.raises(JobError, match="is no plan"):
        planned(job, apply=plan)


def test_a_spent_budget_leaves_switches_untried_and_says_so() -> None:
    found = given(JOBS["phi"])
    assert found.step is not None
    whole = megatron_plan(found.step, replace(found.problem, work=SearchBudget(400)))
    cut = megatron_plan(found.step, replace(found.problem, work=SearchBudget(1e-6)))
    assert UNTRIED in cut.plan.notes
    assert UNTRIED not in whole.plan.notes
    assert not any(one.verdict is SwitchVerdict.UNTRIED for one in whole.effects.switches)
    assert any(one.verdict is SwitchVerdict.UNTRIED for one in cut.effects.switches)
    assert whole.after.makespan_s <= cut.after.makespan_s


def test_options_are_refused_because_switches_are_keys_of_the_job() -> None:
    with pytest.raises(JobError, match=r"keys of \[parallel\]"):
        planned({**JOBS["phi"], "plan": {"options": {"overlap_grad_reduce": False}}})


def test_other_planners_advise_no_switches() -> None:
    assert planned(JOBS["phi"], planner="program_order").megatron is None


def test_a_plain_pipeline_that_stays_so_says_why_its_experts_are_not_asked() -> None:
    job = {**JOBS["mixture"], "parallel": {**MIXTURE, "global_batch": 24, "pipeline": 4}}  # three micro-batches
    result = planned(job)
    assert PLAIN_PIPELINE in result.notes
    assert result.megatron is not None
    assert not any("virtual-stages" in one.switch for one in result.megatron.switches)


@pytest.mark.parametrize(("framework", "has_it"), [("megatron", True), ("megatron_deepspeed", False)])
def test_overlapped_experts_are_tried_of_the_framework_that_has_them(framework: str, *, has_it: bool) -> None:
    parallel = {**MIXTURE, "global_batch": 16, "framework": framework, "pipeline": 1}
    effects = effects_of(raw("mixtral-8x7b", "gb300", 2048, **parallel))
    tried = [one.switch for one in effects.switches]
    assert ("--overlap-moe-expert-parallel-comm" in tried) is has_it


def test_stages_hold_equally_many_layers() -> None:
    with pytest.raises(JobError, match=r"pipeline x chunks = 6 x 1 = 6, must divide the model's layers \(32\)"):
        planned(raw("phi-2", "a100_dgx", pipeline=6))


@pytest.mark.parametrize(("options", "may_cut"), [({}, False), ({"split": True}, True)])
def test_programs_on_cpu_ranks_are_cut_only_if_asked(options: dict[str, bool], may_cut: bool) -> None:
    found = given(raw(SMALL, "a100_dgx", **{**PHI, "zero_stage": 3}))
    brief = replace(found.problem, budget_s=0.5)
    found = replace(found, problem=brief, is_on_cores=True, options=options, planner="ours")
    assert any("Operators are not cut" in note for note in planned_by(found, "ours").plan.notes) is not may_cut


def test_a_budget_that_making_the_graph_exceeds_still_ends_in_a_plan() -> None:
    found = given(raw(SMALL, "a100_dgx", **{**PHI, "zero_stage": 3}))
    hurried = replace(found, problem=replace(found.problem, budget_s=1e-3), options={"split": True}, planner="ours")
    made = planned_by(hurried, "ours")
    assert made.plan.rewrites
    assert made.after.makespan_s > 0


@pytest.mark.parametrize(
    ("model", "more", "asked"),
    [
        ("mixtral-8x7b", {}, True),
        ("mixtral-8x7b", {"recompute": "full"}, False),
        ("mixtral-8x7b", {"recompute": "selective", "recompute_modules": ["moe"]}, False),
        ("nemotron-3-nano-30b-a3b", {}, False),
    ],
)
def test_overlapped_experts_are_not_asked_where_megatron_refuses_them(
    model: str, more: dict[str, object], *, asked: bool
) -> None:
    """Whole layers or mixtures computed again, and hybrids, whose model has no combined schedule."""
    step = Job(parse_job(raw(model, "gb300", 2048, data=8, expert=8, global_batch=16, **more), "job.toml")).step
    assert step is not None
    assert can_overlap_experts(step.model, step.layout) is asked
    assert any("overlap_experts" in keys for _, _, keys in switched_layouts(step)) is asked


def test_two_interleaved_stages_that_wait_for_transfers_are_not_advised() -> None:
    """Megatron-LM asserts more than two stages with --no-overlap-p2p-communication."""
    waits = {"pipeline": 2, "data": 2, "schedule": "interleaved", "chunks": 2, "global_batch": 16}
    assert "--no-overlap-p2p-communication" not in effects_of(raw("phi-2", "h100_dgx", **waits)).arguments
