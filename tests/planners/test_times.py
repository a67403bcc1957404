from dataclasses import replace

import pytest
from random_graphs import fsdp_problem

from lagom_overlap.collective import Collective, CollectiveKind, CommConfig
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import load_preset
from lagom_overlap.planners.resources import Resource, resource_of
from lagom_overlap.planners.schedule import task_graph
from lagom_overlap.planners.times import (
    ModelTimes,
    NamedTimes,
    ShapeTimes,
    origin_name,
)
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import Split

CLUSTER = load_preset("h100_dgx", 2)
MODEL = ModelTimes(ContentionModel(CLUSTER, load_profile("plausible")))
GATHER = CommOp(name="c", collective=Collective(CollectiveKind.ALL_GATHER, 1 << 24, 16), communicator="fsdp")


def test_model_times_are_those_of_the_contention_model_alone() -> None:
    product = CompOp(name="p", work=Gemm(1024, 1024, 1024))
    kernel = MODEL.model.kernel(product.work)
    assert MODEL.seconds(product) == MODEL.model.kernel_seconds(kernel)
    assert MODEL.seconds(GATHER) == MODEL.model.collective(GATHER.collective, CommConfig()).seconds()


def test_a_piece_has_the_configuration_of_the_whole() -> None:
    configs = {"c": CommConfig(num_channels=1)}
    configured = ModelTimes(MODEL.model, configs)
    piece = replace(GATHER, name="c#1")
    assert configured.seconds(piece) == MODEL.model.collective(GATHER.collective, configs["c"]).seconds()
    assert configured.seconds(piece) != MODEL.seconds(piece)


def test_measured_shapes_come_before_the_model_and_unknown_ones_are_refused_without_it() -> None:
    product = CompOp(name="p", work=Gemm(64, 64, 64))
    assert ShapeTimes({product.work: 2.0}, MODEL).seconds(product) == 2.0
    assert ShapeTimes({}, MODEL).seconds(product) == MODEL.seconds(product)
    with pytest.raises(JobError, match="no time was measured for"):
        ShapeTimes({}).seconds(product)


def test_a_measured_operator_scales_its_pieces() -> None:
    problem = fsdp_problem(4)
    name = "backward.1.wgrad"
    whole = next(op for op in problem.iteration.ops if op.name == name)
    named = NamedTimes({name: 2 * MODEL.seconds(whole)}, problem.iteration, MODEL)
    cut = rewritten(problem.iteration, [Split(name, 1, 2)])
    piece = next(op for op in cut.ops if op.name == f"{name}#0")
    assert named.seconds(whole) == pytest.approx(2 * MODEL.seconds(whole))
    assert named.seconds(piece) == pytest.approx(2 * MODEL.seconds(piece))
    other = next(op for op in problem.iteration.ops if op.name == "forward.0")
    assert named.seconds(other) == MODEL.seconds(other)


def test_a_time_of_an_operator_that_does_not_exist_is_refused() -> None:
    with pytest.raises(JobError, match="'nobody', no operator"):
        NamedTimes({"nobody": 1.0}, fsdp_problem(4).iteration, MODEL)


@pytest.mark.parametrize(
    ("name", "origin"), [("c#1", "c"), ("c.rs/g0", "c"), ("c.rs", "c"), ("cc", "cc"), ("d#0", "d#0")]
)
def test_the_origin_of_a_rewritten_name(name: str, origin: str) -> None:
    assert origin_name(name, {"c": 1}) == origin


def test_a_collective_occupies_the_link_that_its_group_spans() -> None:
    groups = {"fsdp": tuple(range(0, 16, 8)) + tuple(range(1, 16, 8)), "tp": tuple(range(8, 16))}
    pair = replace(GATHER, collective=Collective(CollectiveKind.ALL_GATHER, 1024, 4))
    inside = replace(GATHER, communicator="tp", collective=Collective(CollectiveKind.ALL_GATHER, 1024, 8))
    assert resource_of(pair, CLUSTER, groups) is Resource.INTER_LINK
    assert resource_of(inside, CLUSTER, groups) is Resource.INTRA_LINK
    assert resource_of(replace(inside, communicator="unlisted"), CLUSTER, groups) is Resource.INTRA_LINK
    assert resource_of(GATHER, CLUSTER, {}) is Resource.INTER_LINK
    assert resource_of(CompOp(name="p", work=Gemm(1, 1, 1), stream="copy"), CLUSTER, {}) is Resource.COPY_ENGINE


def test_a_group_of_another_size_or_outside_the_cluster_is_refused() -> None:
    with pytest.raises(JobError, match="16 ranks, but group 'fsdp' lists 2"):
        resource_of(GATHER, CLUSTER, {"fsdp": (0, 1)})
    with pytest.raises(JobError, match="rank 16 lies outside"):
        resource_of(GATHER, CLUSTER, {"fsdp": tuple(range(1, 17))})


def test_a_collective_of_an_input_that_nobody_reads_is_a_task_like_others() -> None:
    problem = replace(fsdp_problem(4), times=MODEL)
    graph = task_graph(problem, Iteration("step", (*problem.iteration.ops, GATHER), True))
    assert graph.names[-1] == GATHER.name
    assert graph.preds[-1] == ()
