"""FSDP2's settings as a plan: what we issue with them is what PyTorch's FSDP2 issues, to the digit."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from captured_steps import MODEL, RANKS, fsdp2_capture, problem_of
from torch.distributed.fsdp import FSDPModule

from lagom_overlap.capturing.fake_tensor import capture_step
from lagom_overlap.capturing.models.degrees import Degrees
from lagom_overlap.capturing.models.named import decoder_step
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.planners.deadline import SearchBudget
from lagom_overlap.planners.effects import MIN_GAIN
from lagom_overlap.planners.fsdp2 import Fsdp2
from lagom_overlap.planners.simulated import SimulatedPlan, simulated
from lagom_overlap.units import format_memory
from lagom_overlap.verbs.plan import PlanRequest, run_plan
from lagom_overlap.verbs.plan_apply import apply_fsdp2
from lagom_overlap.verbs.plan_problem import read_input
from lagom_overlap.workload import CompOp, Iteration, MemoryBound
from lagom_overlap.workload.fsdp2.reduced import in_param_dtype
from lagom_overlap.workload.fsdp2.reissue import reissued
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings
from lagom_overlap.workload.fsdp2.visits import units_of, visits_of

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

LAYERS = tuple(f"layers.{number}" for number in range(MODEL.num_layers))
UNITS = ("embedding", *LAYERS, "norm, head")


def problem() -> PlanProblem:
    return replace(problem_of(fsdp2_capture()), work=SearchBudget(40.0))


def ours(settings: Fsdp2Settings) -> SimulatedPlan:
    step = problem()
    return simulated(step, reissued(step.iteration, step.unplanned, settings))


def pytorchs(settings: Fsdp2Settings) -> SimulatedPlan:
    """PyTorch's own FSDP2 told the settings, captured."""

    def step():
        made = decoder_step(MODEL, Degrees(fsdp=RANKS), micro_batch=1, seq_len=2048)
        apply_fsdp2(made.model, settings)
        return made

    captured = problem_of(capture_step(step, num_ranks=RANKS, rank=0))
    return simulated(captured, captured.unplanned)


def test_fsdp2s_own_settings_issue_its_own_step_to_the_digit():
    step = problem()
    assert reissued(step.iteration, step.unplanned, Fsdp2Settings(units=UNITS)).ops[0] == step.unplanned.ops[0]
    assert ours(Fsdp2Settings(units=UNITS)).makespan_s == simulated(step, step.unplanned).makespan_s


@pytest.mark.parametrize(
    "settings",
    [
        Fsdp2Settings(units=UNITS, forward_prefetch=3),
        Fsdp2Settings(units=UNITS, backward_prefetch=3, reduce_buffers=2),
        Fsdp2Settings(units=UNITS, kept=UNITS, separate_reduce_group=True),
        Fsdp2Settings(units=UNITS, forward_prefetch=2, backward_prefetch=2, kept=("layers.1", "layers.3")),
        Fsdp2Settings(units=UNITS, kept=("layers.3",), reduce_in_param_dtype=True),
    ],
)
def test_settings_issue_what_pytorch_issues_to_the_digit(settings: Fsdp2Settings):
    needs = ["set_reduce_scatter_max_input_buffers"] if settings.reduce_buffers > 1 else []
    needs += ["set_separate_reduce_scatter_group"] if settings.separate_reduce_group else []
    if missing := [name for name in needs if not hasattr(FSDPModule, name)]:
        pytest.skip(f"this PyTorch has no {missing[0]}")
    made, real = ours(settings), pytorchs(settings)
    # Sums of other operators' times are rounded. Where FSDP2 reduces in the smaller type, PyTorch 2.15 casts the norms'
    # gradients by kernels of their own, which it has not where it reduces in the larger one.
    mixes = any(op.origin.kernel == "fsdp.chunk_cat_mixed_dtype" for op in problem().iteration.ops)
    near = 1e-3 if mixes and settings.reduce_in_param_dtype else 1e-12
    assert made.makespan_s == pytest.approx(real.makespan_s, rel=near)
    assert made.exposed_s == pytest.approx(real.exposed_s, rel=near)
    assert made.peak_bytes == pytest.approx(real.peak_bytes, rel=near)


def test_each_advised_setting_gains_with_itself_applied_and_the_others_do_not():
    plan = Fsdp2().plan(problem())
    assert isinstance(plan.settings, Fsdp2Settings)
    planned_s, own_s = ours(plan.settings).makespan_s, simulated(problem(), problem().unplanned).makespan_s
    assert simulated(problem(), plan.iteration).makespan_s == planned_s < own_s
    for one in plan.effects:
        assert one.with_s == planned_s
        assert one.without_s - one.with_s > MIN_GAIN * own_s
    assert plan.not_advised
    for one in plan.not_advised:
        assert one.without_s == planned_s
        assert one.without_s - one.with_s <= MIN_GAIN * own_s or "allowed" in one.switch


def test_as_many_units_are_kept_as_fit_the_memory():
    own = simulated(problem(), problem().unplanned).peak_bytes
    every = ours(Fsdp2Settings(units=UNITS, kept=UNITS)).peak_bytes
    limited = replace(problem(), memory_limit_bytes=(own + every) // 2)
    plan = Fsdp2().plan(limited)
    assert isinstance(plan.settings, Fsdp2Settings)
    assert 0 < len(plan.settings.kept) < len(UNITS)
    assert simulated(limited, plan.iteration).peak_bytes <= limited.memory_limit_bytes
    with pytest.raises(JobError, match=r"FSDP2's own step needs .* bytes too many"):
        Fsdp2().plan(replace(problem(), memory_limit_bytes=own - 1))


def test_a_budget_for_one_setting_goes_to_the_one_that_saves_most_bytes():
    plan = Fsdp2().plan(replace(problem(), work=SearchBudget(1e-6)))
    assert plan.settings == Fsdp2Settings(units=UNITS, kept=UNITS)
    assert [one.switch for one in plan.effects] == ["reshard_after_forward=False for all units"]


def test_gradients_are_reduced_in_the_parameters_type_only_where_the_user_allows_it():
    plain = Fsdp2().plan(problem())
    assert all("reduce_dtype" not in one.switch for one in (*plain.effects, *plain.not_advised))
    plan = Fsdp2(reduce_in_param_dtype=True).plan(problem())
    said = [one.switch for one in (*plan.effects, *plan.not_advised)]
    assert sum("reduce_dtype=param_dtype (allowed; results change)" in one for one in said) == 1
    smaller = in_param_dtype(problem().iteration)
    with pytest.raises(JobError, match="reduce_in_param_dtype: nothing to make smaller"):
        Fsdp2(reduce_in_param_dtype=True).plan(replace(problem(), iteration=smaller, issued=None))


def test_a_step_that_fsdp2_does_not_issue_is_refused():
    iteration = Iteration("plain", (CompOp(name="a", work=MemoryBound(8)),), is_dataflow=True)
    with pytest.raises(JobError, match="gathers no parameters on FSDP2's streams"):
        Fsdp2().plan(replace(problem(), iteration=iteration, issued=None))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"forward_prefetch": -1}, "forward_prefetch is -1"),
        ({"reduce_buffers": 0}, "reduce_buffers is 0"),
        ({"kept": ("layers.9",)}, "kept names 'layers.9'"),
        ({"units": ("a", "a")}, "named twice"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object], words: str):
    with pytest.raises(JobError, match=words):
        Fsdp2Settings(**{"units": UNITS, **wrong})


def test_lists_name_the_units_that_come_next_and_skip_what_is_kept():
    settings = Fsdp2Settings(units=("a", "b", "c", "d"), forward_prefetch=2, backward_prefetch=2, kept=("b",))
    assert [settings.forward_list(unit) for unit in "abcd"] == [("b", "c"), ("c", "d"), ("d",), ()]
    assert [settings.backward_list(unit) for unit in "abcd"] == [(), ("a",), ("a",), ("c", "a")]


SMALL = replace(MODEL, name="small", num_layers=2, hidden=512, ffn=2048, num_heads=8, num_kv_heads=8, head_dim=64)
ROUTED = replace(SMALL, name="small-moe", num_experts=8, experts_per_token=2)


@pytest.mark.parametrize(
    ("model", "degrees", "num_batches"),
    [
        (SMALL, Degrees(replicate=2, fsdp=4), 1),
        (SMALL, Degrees(fsdp=4, tensor=2), 1),
        (SMALL, Degrees(fsdp=8), 2),
        (ROUTED, Degrees(fsdp=8, expert=4), 1),
    ],
    ids=["hybrid", "tensor", "accumulation", "experts"],
)
def test_every_layout_is_issued_as_pytorch_does_with_parameters_kept_and_without(model, degrees, num_batches):
    def captured(kept: bool) -> PlanProblem:
        def step():
            made = decoder_step(model, degrees, micro_batch=1, seq_len=512)
            if kept:
                made.model.set_reshard_after_forward(False)
            return replace(made, num_micro_batches=num_batches)

        return problem_of(capture_step(step, num_ranks=RANKS, rank=0))

    own, kept = captured(kept=False), captured(kept=True)
    units = units_of(visits_of(own.iteration))
    for settings, real in ((Fsdp2Settings(units=units), own), (Fsdp2Settings(units=units, kept=units), kept)):
        made = simulated(own, reissued(own.iteration, own.unplanned, settings))
        pytorchs_own = simulated(real, real.unplanned)
        assert made.makespan_s == pytest.approx(pytorchs_own.makespan_s, rel=1e-9)
        assert made.peak_bytes == pytorchs_own.peak_bytes


def test_the_limit_that_is_shown_is_the_one_that_the_search_keeps() -> None:
    """Nine tenths of the GPU's memory, where the job has no limit of its own."""
    job = {
        "job": {"name": "one"},
        "model": {"name": "llama-3.2-1b", "seq_len": 1024},
        "cluster": {"preset": "a40_nvlink"},
        "parallel": {"fsdp": 8},
    }
    result = run_plan(read_input(parse_job(job, "job.toml")), PlanRequest(carrier=Carrier.FSDP2, work=0.1))
    limit = result.peak_memory_bytes.limit
    assert limit == int(0.9 * load_preset("a40_nvlink").gpu.memory_bytes)
    assert any(f"fits {format_memory(limit)}" in note for note in result.notes)
