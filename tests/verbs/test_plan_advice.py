"""A plan as FSDP2's settings and Megatron's switches, against orders of known depth."""

from dataclasses import replace

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.base import Plan, PlanProblem
from lagom_overlap.verbs.plan_advice import fsdp2_advice, megatron_arguments
from lagom_overlap.workload import Buffer, CommOp, CompOp, Gemm, Iteration, Origin, Phase
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Fuse, Reorder

LAYERS = 6
FORWARD = Origin(phase=Phase.FORWARD)
BACKWARD = Origin(phase=Phase.BACKWARD)


class Times:
    def seconds(self, op):
        return 1e-3


def gather(name, origin):
    collective = Collective(CollectiveKind.ALL_GATHER, 64, 2)
    return CommOp(name=name, collective=collective, communicator="fsdp", origin=origin)


def step():
    ops, last = [], ()
    for layer in range(LAYERS):
        ops += [
            gather(f"ag{layer}", FORWARD),
            CompOp(name=f"f{layer}", work=Gemm(8, 8, 8), deps=(f"ag{layer}", *last), origin=FORWARD),
        ]
        last = (f"f{layer}",)
    for layer in reversed(range(LAYERS)):
        ops.append(gather(f"bg{layer}", BACKWARD))
        ops.append(CompOp(name=f"b{layer}", work=Gemm(8, 8, 8), deps=(f"bg{layer}", *last), origin=BACKWARD))
        last = (f"b{layer}",)
        scatter = Collective(CollectiveKind.REDUCE_SCATTER, 64, 2)
        ops.append(CommOp(name=f"rs{layer}", collective=scatter, communicator="fsdp", deps=last, origin=BACKWARD))
    buffers = tuple(
        Buffer(name=f"w{phase}{layer}", num_bytes=64, maker=f"{phase}g{layer}", users=(f"{user}{layer}",))
        for phase, user in (("a", "f"), ("b", "b"))
        for layer in range(LAYERS)
    )
    return Iteration("step", tuple(ops), is_dataflow=True, buffers=buffers)


def planned(rewrites):
    iteration = step()
    problem = PlanProblem(iteration=iteration, cluster=load_preset("a40_nvlink"), times=Times())
    plan = Plan(planner="p", rewrites=rewrites, iteration=rewritten(iteration, rewrites), lower_bound_s=1e-3)
    return problem, plan


def ahead(depth):
    """Gather k is issued before the computation that uses gather k - depth."""
    names = []
    for user, maker, numbers in (("f", "ag", range(LAYERS)), ("b", "bg", range(LAYERS - 1, -1, -1))):
        layers = list(numbers)
        gathers = [f"{maker}{layer}" for layer in layers]
        names += gathers[:depth]
        for place, layer in enumerate(layers):
            names += [*gathers[place + depth : place + depth + 1], f"{user}{layer}"]
            names += [f"rs{layer}"] if user == "b" else []
    return (Reorder(tuple(names)),)


def test_program_order_asks_for_no_prefetch():
    advice = fsdp2_advice(*planned(()))
    assert (advice.forward_prefetch, advice.backward_prefetch, advice.modules_per_unit) == (0, 0, 1)
    assert advice.reshard_after_forward


def test_the_depth_of_the_plan_is_the_depth_of_the_lists():
    for depth in (1, 2, 3):
        advice = fsdp2_advice(*planned(ahead(depth)))
        assert (advice.forward_prefetch, advice.backward_prefetch) == (depth, depth)
        assert f"the {depth} unit" in " ".join(advice.sentences())


def test_a_step_that_keeps_its_parameters_is_told_to_keep_them():
    whole = step()
    kept = tuple(op for op in whole.ops if not op.name.startswith("bg"))
    kept = tuple(replace(op, deps=tuple(dep for dep in op.deps if not dep.startswith("bg"))) for op in kept)
    buffers = tuple(buffer for buffer in whole.buffers if buffer.maker.startswith("ag"))
    iteration = replace(whole, ops=kept, buffers=buffers)
    problem = PlanProblem(iteration=iteration, cluster=load_preset("a40_nvlink"), times=Times())
    plan = Plan(planner="p", rewrites=(), iteration=iteration, lower_bound_s=1e-3)
    assert not fsdp2_advice(problem, plan).reshard_after_forward


def test_fused_gathers_are_units_of_several_modules():
    fused = (Fuse(("ag0", "ag1")), Fuse(("ag2", "ag3")), Fuse(("ag4", "ag5")))
    assert fsdp2_advice(*planned(fused)).modules_per_unit == 2


def test_a_step_without_parameter_gathers_gets_no_advice():
    ops = (CompOp(name="a", work=Gemm(8, 8, 8)),)
    iteration = Iteration("plain", ops, is_dataflow=True)
    problem = PlanProblem(iteration=iteration, cluster=load_preset("a40_nvlink"), times=Times())
    plan = Plan(planner="p", rewrites=(), iteration=iteration, lower_bound_s=1e-3)
    assert fsdp2_advice(problem, plan) is None
    assert megatron_arguments(problem, plan) == ()


def test_megatron_gathers_ahead_if_the_plan_does():
    assert "--overlap-param-gather" not in megatron_arguments(*planned(()))
    assert {"--overlap-param-gather", "--overlap-grad-reduce"} <= set(megatron_arguments(*planned(ahead(1))))
