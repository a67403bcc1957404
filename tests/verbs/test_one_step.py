"""One job file, one step: every verb that takes an example speaks of the same operators, bytes and predicted time.

`VERBS` lists what each example is taken or refused by; an example that is missing there fails, none is skipped. What a
verb says of a named model is compared to the digit.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from lagom_overlap.capturing.file import write_capture
from lagom_overlap.cli.main import main
from lagom_overlap.collective import CommConfig, LaunchConfig, launched
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job, read_job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.jobfile.variants import JobVariants
from lagom_overlap.jobfile.whole_step import WholeStep
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.fsdp2 import Fsdp2
from lagom_overlap.planners.simulated import simulated
from lagom_overlap.planners.times import ModelTimes
from lagom_overlap.verbs.compare import CompareRequest, run_compare
from lagom_overlap.verbs.plan import PlanRequest, run_plan
from lagom_overlap.verbs.plan_problem import PlanFlags, PlanInput, read_input
from lagom_overlap.verbs.simulate import SimulateRequest, SimulateResult, run_simulate
from lagom_overlap.verbs.tune import TuneRequest, run_tune
from lagom_overlap.workload import Attention, Gemm, Iteration, MemoryBound, find_overlap_groups
from lagom_overlap.workload.fsdp2 import visits
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.step import IssueRules, load_rules

DDP = load_rules("ddp")
DEEPSPEED = load_rules("deepspeed")
FSDP2 = load_rules("fsdp2")
MEGATRON = load_rules("megatron")

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Verbs:
    """Which verbs take an example as a step of a model; None, or the words of their refusal."""

    simulate: str | None = None
    plan: str | None = None
    tune: str | None = None


GROUPS = Verbs(simulate=r"the job has no \[model\]", plan=r"the job has no \[model\] and no \[program\]")
PROGRAM = Verbs(simulate=r"the job has no \[model\]", tune=r"\[program\] is read by `lagom plan` only")
VERBS = {
    "phi2_fsdp_a40.toml": Verbs(),
    "llama3_1b_ddp_h100.toml": Verbs(),
    "both_sides_h100.toml": Verbs(),
    "gpt_175b_3d_a100.toml": Verbs(),
    "llama3_8b_fsdp2_h100.toml": Verbs(),
    "qwen3_30b_moe_megatron_h100.toml": Verbs(),
    "gpt_fsdp_gloo.toml": GROUPS,
    "workers_ag_rs.toml": GROUPS,
    "overlaps/gloo_fsdp.toml": GROUPS,
    "overlaps/gloo_link_fsdp.toml": GROUPS,
    "overlaps/gloo_link_long.toml": GROUPS,
    "overlaps/gloo_link_moe.toml": GROUPS,
    "overlaps/gloo_moe.toml": GROUPS,
    "overlaps/gloo_tensor.toml": GROUPS,
    "overlaps/nccl_fsdp.toml": GROUPS,
    "overlaps/workers_fsdp.toml": GROUPS,
    "overlaps/workers_moe.toml": GROUPS,
    "overlaps/workers_tensor.toml": GROUPS,
    "plan_zero_gloo.toml": PROGRAM,
    "plan_zero_mesh_gloo.toml": PROGRAM,
    "plan_across_steps_gloo.toml": PROGRAM,
    "plan_experts_gloo.toml": PROGRAM,
    "plan_fsdp2_gloo.toml": PROGRAM,
}
MODELS = [name for name, verbs in VERBS.items() if verbs.simulate is None]
TUNED = [name for name in MODELS if VERBS[name].tune is None]
LARGE = "qwen3_30b_moe_megatron_h100.toml"


def job(name: str) -> JobSpec:
    return read_job(EXAMPLES / name)


@cache
def said_of(name: str) -> SimulateResult:
    """What `simulate` says of an example."""
    return run_simulate(SimulateRequest(job=Job(job(name))))


@cache
def given_of(name: str) -> PlanInput:
    """What `plan` makes of an example."""
    return read_input(EXAMPLES / name)


def operators(step: Iteration) -> list[tuple[object, ...]]:
    """Every operator: name, stream, what it computes or moves, what it waits for."""
    return [
        (op.name, op.stream, getattr(op, "work", None) or getattr(op, "collective", None), op.deps) for op in step.ops
    ]


def test_every_example_is_listed() -> None:
    found = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.toml")}
    assert found == set(VERBS)


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_takes_an_example_or_says_why_not(name: str) -> None:
    expected, spec = VERBS[name], job(name)
    if expected.simulate is None:
        assert said_of(name).iteration_s > 0
    else:
        with pytest.raises(JobError, match=expected.simulate):
            said_of(name)
    if expected.tune is None:
        assert Job(spec).groups
    else:
        with pytest.raises(JobError, match=expected.tune):
            _ = Job(spec).groups
    if expected.plan is not None:
        with pytest.raises(JobError, match=expected.plan):
            given_of(name)
    elif spec.program is None:  # a program is captured and timed on real ranks: tests of plan run those
        assert given_of(name).problem.iteration.ops


@pytest.mark.parametrize("preset", ["a40_nvlink", "h100_dgx"])
def test_a_product_of_a_captured_step_has_the_price_of_a_built_one(tmp_path: Path, preset: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        f'[job]\nname = "x"\n[model]\nname = "phi-2"\nseq_len = 1024\n[cluster]\npreset = "{preset}"\n'
        "[parallel]\nfsdp = 8\n"
    )
    given, product = read_input(path).problem, Gemm(4096, 4096, 4096)
    assert isinstance(given.times, ModelTimes)
    built, captured = given.times.price.model, Job(read_job(path)).price_on(given.cluster)
    assert captured.kernel_seconds(captured.kernel(product)) == built.kernel_seconds(built.kernel(product))


@pytest.mark.parametrize("framework", ["megatron", "megatron_deepspeed", "torchtitan"])
@pytest.mark.parametrize(
    "work", [MemoryBound(10**9), Attention(batch=2, num_heads=32, seq_len=4096, head_dim=128), Gemm(4096, 4096, 4096)]
)
def test_a_search_prices_an_operator_as_the_step_of_its_framework_does(
    tmp_path: Path, framework: str, work: MemoryBound | Attention | Gemm
) -> None:
    """Megatron-DeepSpeed's memory-bound kernels are slower than others', and each has its kernel of attention."""
    path = tmp_path / "job.toml"
    path.write_text(
        f'[job]\nname = "x"\n[model]\nname = "llama-2-7b"\nseq_len = 1024\n[cluster]\npreset = "h100_dgx"\n'
        f'[parallel]\ntensor = 8\nframework = "{framework}"\n'
    )
    spec = read_job(path)
    built = Job(spec).step
    assert built is not None
    request, stepped = Job(spec).request_for(()), built.simulator.price.model
    searched = ContentionModel(built.cluster, load_profile(request.profile), operators=request.operators)
    for model in (searched, Job(spec).price_on(built.cluster)):
        assert model.kernel_seconds(model.kernel(work)) == stepped.kernel_seconds(stepped.kernel(work))


def test_a_capture_on_a_named_cluster_is_priced_as_in_a_job(tmp_path: Path) -> None:
    built = Job(job("llama3_8b_fsdp2_h100.toml")).step
    assert built is not None
    step = built.issued
    write_capture(tmp_path / "step.json.gz", replace(step, iteration=replace(step.iteration, is_dataflow=True)))
    (tmp_path / "job.toml").write_text(
        f'[job]\nname = "x"\n[model]\ncapture = "{tmp_path}/step.json.gz"\n[cluster]\npreset = "h100_dgx"\nnodes = 8\n'
    )
    work = Attention(batch=2, num_heads=32, seq_len=4096, head_dim=128)
    found = []
    for source, asked in (("step.json.gz", PlanFlags(cluster="h100_dgx")), ("job.toml", None)):
        times = read_input(tmp_path / source, asked).problem.times
        assert isinstance(times, ModelTimes)
        found.append(times.price.model.kernel_seconds(times.price.model.kernel(work)))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", MODELS)
def test_plan_begins_with_the_step_that_simulate_predicts(name: str) -> None:
    built, given = Job(job(name)).step, given_of(name)
    assert built is not None
    assert operators(given.issued) == operators(built.issued.issued)
    before_s = simulated(given.problem, given.issued).makespan_s
    said = said_of(name)
    assert before_s == pytest.approx(said.stages[0].step_s, rel=1e-12)  # sums of layers that are repeated round apart
    if built.is_whole:
        assert before_s == pytest.approx(said.iteration_s, rel=1e-12)


def generated(framework: str, seed: int) -> dict[str, dict[str, Any]]:
    """Some job of a framework's; Megatron-LM's are in test_plan_megatron."""
    dice = Random(f"{framework} {seed}")
    data, tensor = dice.choice((2, 4, 8)), dice.choice((1, 2))
    parallel: dict[str, Any] = {"framework": framework, "global_batch": data * dice.choice((1, 2, 4))}
    if framework in ("fsdp2", "torchtitan"):
        parallel |= {"fsdp": data, "tensor": tensor}
    elif framework == "ddp":
        parallel |= {"data": data}
    else:
        parallel |= {"data": data, "tensor": tensor, "zero_stage": dice.choice((0, 1))}
    if dice.random() < 0.5:
        parallel["recompute"] = dice.choice(("full", "selective"))
    return {
        "job": {"name": "one"},
        "model": {"name": "llama-3.2-1b", "seq_len": dice.choice((512, 1024))},
        "cluster": {"preset": dice.choice(("a100_dgx", "h100_dgx"))},
        "parallel": parallel,
    }


@pytest.mark.parametrize("framework", ["fsdp2", "torchtitan", "ddp", "deepspeed", "megatron_deepspeed"])
def test_plan_begins_with_that_step_of_generated_jobs_too(framework: str) -> None:
    """Of more than three micro-batches `simulate` repeats the second, where a plan runs each: nearly the same."""
    for seed in (0, 5):
        job = generated(framework, seed)
        spec, parallel = parse_job(job, "job.toml"), job["parallel"]
        num_batches = parallel["global_batch"] // parallel.get("fsdp", parallel.get("data"))
        built, given = Job(spec).step, read_input(spec)
        assert built is not None
        before_s = simulated(given.problem, given.issued).makespan_s
        assert before_s == pytest.approx(built.times.iteration_s, rel=1e-12 if num_batches <= 3 else 1e-5)


@pytest.mark.parametrize("framework", ["fsdp2", "torchtitan"])
def test_a_plans_settings_typed_as_keys_are_the_step_and_the_memory_that_the_plan_shows(framework: str) -> None:
    """The plan's after, and settings that it might have chosen: `reshard_after_forward`, lists, buffers, a group."""
    for seed in (1,):
        raw = generated(framework, seed)
        raw["parallel"]["global_batch"] = raw["parallel"]["fsdp"]
        given, dice = read_input(parse_job(raw, "job.toml")), Random(seed)
        plan = Fsdp2().plan(replace(given.problem, work=SearchBudget(0.1)))
        units = visits.units_of(visits.visits_of(given.problem.iteration))
        drawn = Fsdp2Settings(
            units=units,
            kept=units[dice.choice((0, 3, 9)) :],
            forward_prefetch=dice.choice((0, 3)),
            backward_prefetch=dice.choice((0, 2)),
            reduce_buffers=dice.choice((2, 4)),
            separate_reduce_group=True,
        )
        for settings in (drawn, plan.settings):
            assert isinstance(settings, Fsdp2Settings)
            step = simulated(given.problem, given.problem.with_settings(settings))
            typed = Job(parse_job(raw | {"parallel": raw["parallel"] | settings.keys()}, "job.toml")).step
            assert typed is not None
            assert typed.layout != given.step.layout  # type: ignore[union-attr]  # a named model's
            assert step.peak_bytes == typed.most_bytes
            assert step.makespan_s == pytest.approx(typed.times.iteration_s, rel=1e-12)
        assert simulated(given.problem, plan.iteration).peak_bytes == step.peak_bytes
        sets = [one for advice in plan.effects for one in advice.key.split(" --set ")]
        typed = Job(JobVariants.of(raw, "job.toml", Path(), sets).one()).step
        assert typed is not None
        assert (typed.most_bytes, typed.times.iteration_s) == (step.peak_bytes, pytest.approx(step.makespan_s))


@pytest.mark.parametrize("keys", [{"pipeline": 2, "global_batch": 16}, {"global_batch": 32, "seq_len": 512}])
def test_fsdp2s_settings_are_judged_by_the_iteration_that_simulate_predicts_with_them(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    """All stages and micro-batches: a plan of a pipeline told of one micro-batch of its first stage."""
    raw: dict[str, Any] = {
        "job": {"name": "whole"},
        "model": {"name": "llama-3.2-1b", "seq_len": keys.pop("seq_len", 2048)},
        "cluster": {"preset": "h100_dgx"},
        "parallel": {"framework": "fsdp2", "fsdp": 4, **keys},
    }
    given = read_input(parse_job(raw, "job.toml"))
    given = replace(given, problem=replace(given.problem, work=SearchBudget(0.5)))
    result = run_plan(given, PlanRequest(out=tmp_path / "run"))

    @cache
    def typed(*lines: str) -> tuple[float, int]:
        sets = [one for line in lines for one in line.split(" --set ")]
        step = Job(JobVariants.of(raw, "job.toml", Path(), sets).one()).step
        assert step is not None
        return step.times.iteration_s, step.most_bytes

    assert result.fsdp2 is not None
    advised = [one.key for one in result.fsdp2.switches]
    assert advised
    assert (result.iteration_s.before, result.peak_memory_bytes.before) == typed()
    assert (result.iteration_s.after, result.peak_memory_bytes.after) == typed(*advised)
    for one in result.fsdp2.switches:
        assert one.with_s == result.iteration_s.after
    for one in result.fsdp2.not_advised:
        assert one.with_s == typed(*advised, one.key)[0]
    assert not any("first of" in note for note in result.notes)
    assert (tmp_path / "run" / "report.html").exists()
    again = run_plan(given, PlanRequest(apply=tmp_path / "run" / "plan.toml"))
    assert (again.iteration_s, again.carrier) == (result.iteration_s, result.carrier)


def test_a_job_that_has_settings_begins_with_them_and_is_told_what_to_add() -> None:
    raw = generated("fsdp2", 1)
    raw["parallel"] |= {"global_batch": raw["parallel"]["fsdp"], "kept_units": 2, "reduce_buffers": 4}
    given = read_input(parse_job(raw, "job.toml"))
    own = given.problem.settings
    assert own is not None
    assert (len(own.kept), own.reduce_buffers) == (2, 4)
    told = given.problem.with_settings(own)
    assert operators(told) == operators(given.problem.unplanned)
    assert simulated(given.problem, told).peak_bytes == given.step.most_bytes  # type: ignore[union-attr]
    plan = Fsdp2().plan(replace(given.problem, work=SearchBudget(0.1)))
    assert not any("max_input_buffers" in one.switch for one in plan.effects)


def test_a_stage_of_a_pipeline_keeps_all_parameters_or_none() -> None:
    """No key says that it keeps some of them; what is advised gains in the whole iteration, too."""
    raw: dict[str, Any] = {"job": {"name": "p"}, "model": {"name": "llama-3.2-1b", "seq_len": 2048}}
    raw |= {"cluster": {"preset": "h100_dgx"}}
    raw |= {"parallel": {"framework": "fsdp2", "fsdp": 4, "pipeline": 2, "global_batch": 16}}
    given = read_input(parse_job(raw, "job.toml"))
    plan = Fsdp2().plan(replace(given.problem, work=SearchBudget(0.1)))
    keys = [one.key for one in plan.effects if "reshard_after_forward" in one.switch]
    assert keys == ["parallel.zero_stage=2"]
    before, after = (
        run_simulate(SimulateRequest(job=Job(parse_job(raw | {"parallel": raw["parallel"] | typed}, "job.toml"))))
        for typed in ({}, {"zero_stage": 2})
    )
    assert after.iteration_s < before.iteration_s


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name == LARGE else name for name in TUNED]
)
def test_tune_finds_its_groups_in_that_step_and_predicts_the_same(name: str, tmp_path: Path) -> None:
    spec = job(name)
    built = Job(spec).step
    assert built is not None
    if built.is_whole:
        step = Job(spec).issued
        assert step is not None
        assert operators(step) == operators(built.issued.issued)
        assert Job(spec).groups == find_overlap_groups(step)
    said = said_of(name).iteration_s
    found = run_tune(TuneRequest(job=Job(spec), tuner="default", out=tmp_path / "run"))
    assert found.step_s == said


@pytest.mark.parametrize(
    "name",
    [
        "phi2_fsdp_a40.toml",
        pytest.param("gpt_175b_3d_a100.toml", marks=pytest.mark.long),
        pytest.param(LARGE, marks=pytest.mark.long),
    ],
)
def test_compare_speaks_of_that_step_too(name: str, tmp_path: Path) -> None:
    spec = job(name)
    said = said_of(name).iteration_s
    found = run_compare(CompareRequest(job=Job(spec), tuners=("default", "fixed_min")))
    assert found.step_s == found.rows[0].step_s == said
    unguarded = msgspec.structs.replace(spec, tune=msgspec.structs.replace(spec.tune, guard=False))
    tuned = run_tune(TuneRequest(job=Job(unguarded), tuner="fixed_min", out=tmp_path / "run"))
    assert tuned.tuned_step_s == found.rows[1].step_s
    assert tuned.tuned_step_s not in (None, said)


def test_the_step_with_settings_is_simulates_with_every_call_of_a_group_set_by_name(tmp_path: Path) -> None:
    """Group 1 is the forward's gathers of layers 1 to 31, group 7 the last of backward (counted by hand)."""
    name, config = "phi2_fsdp_a40.toml", CommConfig(num_channels=2)
    spec, given = job(name), given_of(name)
    groups = Job(spec).groups
    backend = Job(spec).open("simulated", Job(spec).request_for(groups))
    problems = tuple(backend.problem(group) for group in groups)
    step = WholeStep.of(Job(spec), "simulated")
    assert step is not None
    found = {groups[1].name: (config,), groups[7].name: (problems[7].default[0], config)}
    assert (groups[1].comm_names, groups[7].comm_names) == (
        ("mb0.layer1.gather",),
        ("mb0.layer1.scatter", "mb0.embed.gather_d"),
    )
    first = {f"mb0.layer{layer}.gather": config for layer in range(1, 32)}
    second = {"mb0.embed.gather_d": config}
    by_hand = {
        key: simulated(given.problem, given.issued, configs).makespan_s
        for key, configs in (("both", first | second), (groups[1].name, first), (groups[7].name, second))
    }
    assert step.seconds(problems, {}) == said_of(name).iteration_s
    assert step.seconds(problems, found) == by_hand.pop("both")
    assert step.alone(problems, found) == by_hand
    assert step.seconds(problems, {groups[0].name: launched((config,), LaunchConfig(sm_carveout=8))}) is None


def test_every_verb_refuses_a_job_that_does_not_fit_in_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\nname = "x"\n[model]\nname = "llama-3-70b"\nseq_len = 4096\n[cluster]\npreset = "h100_dgx"\n'
        "[parallel]\nfsdp = 8\n"
    )
    spec, said = read_job(path), list[str]()
    verbs: list[Callable[[], object]] = [
        lambda: run_simulate(SimulateRequest(job=Job(spec))),
        lambda: run_tune(TuneRequest(job=Job(spec), out=tmp_path / "run")),
        lambda: run_compare(CompareRequest(job=Job(spec), tuners=("default",))),
        lambda: read_input(path),
    ]
    for verb in verbs:
        with pytest.raises(JobError, match=r"stage 0 needs 230\.\d GB per GPU, H100-SXM5-80GB has 85\.0 GB") as caught:
            verb()
        said.append(str(caught.value))
    for arguments in (["simulate"], ["tune"], ["compare"], ["plan"], ["compare", "--planners", "ours"]):
        assert main([arguments[0], str(path), *arguments[1:]]) == 2
    assert len(set(said)) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_begins_with_the_memory_and_the_exposed_time_that_simulate_counts(name: str) -> None:
    given, said = given_of(name), said_of(name)
    before = simulated(given.problem, given.issued)
    assert before.peak_bytes == said.stages[0].memory.total_bytes
    if given.problem.pipeline == 1:
        exposed_s = sum(comm.exposed_s for comm in said.communicators.values())
        assert before.exposed_s == pytest.approx(exposed_s, rel=1e-9)


def test_memory_is_written_alike_wherever_it_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """19.3 GB of Phi-2: terminal, page and JSON of both verbs."""
    file, printed, pages, numbers = str(EXAMPLES / "phi2_fsdp_a40.toml"), list[str](), list[str](), list[int]()
    for verb, flags in (("simulate", []), ("plan", ["--planner", "program_order"])):
        assert main([verb, file, *flags, "--out", str(tmp_path / verb)]) == 0
        printed.append(capsys.readouterr().out)
        pages.append((tmp_path / verb / "report.html").read_text())
        result = json.loads((tmp_path / verb / "run.json").read_text())["result"]
        numbers.append(result.get("memory_bytes") or result["peak_memory_bytes"]["before"])
    assert numbers == [19_277_324_288] * 2
    assert all("19.3 GB" in text for text in (*printed, *pages))


@pytest.mark.parametrize("rules", [FSDP2, DDP, MEGATRON, DEEPSPEED])
def test_phi_2_reduces_what_its_framework_and_precision_say(rules: IssueRules) -> None:
    """The bytes of the gradients: parameters times the reduction's format, whatever the framework's units."""
    built = Job(job("phi2_fsdp_a40.toml")).step
    assert built is not None
    own = rules.precision
    stage = 0 if rules in (DDP, MEGATRON) else 3
    layout = replace(built.layout, zero_stage=stage)
    step = replace(built, rules=rules, precision=own, layout=layout).issued
    kinds = ("reduce_scatter", "all_reduce")
    moved = sum(
        op.collective.num_bytes
        for op in step.iteration.comms
        if op.collective.kind in kinds and op.origin.module != "clip"
    )
    assert moved == built.model.num_params * own.reduction.num_bytes
