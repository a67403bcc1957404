"""Decisions as they are printed: computations that are cut alone are among them."""

import msgspec

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.planners.base import Plan
from lagom_overlap.report.plan import decision_text, decisions_headline
from lagom_overlap.results.plan_decisions import decisions_of
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration, ShardSpec, TensorUse
from lagom_overlap.workload.rewrite.apply import rewritten
from lagom_overlap.workload.rewrite.steps import ChainLink, Split
from lagom_overlap.workload.sharding import Gather, Reduce

PRODUCT = ShardSpec(
    inputs=(TensorUse("", (0, 1)), TensorUse("", (1, 2))), combine=(Gather(0), Reduce(), Gather(1)), sizes=(64, 64, 64)
)
GATHERED = ShardSpec(inputs=(TensorUse("", (0, None)),), combine=(Gather(0),), sizes=(64,))
STEP = Iteration(
    "step",
    (
        CompOp(name="a", work=Gemm(64, 64, 64), shards=PRODUCT),
        CommOp(name="c", collective=Collective(CollectiveKind.ALL_GATHER, 4096, 2), deps=("a",), shards=GATHERED),
        CompOp(
            name="b",
            work=Gemm(64, 64, 64),
            deps=("c",),
            shards=ShardSpec(
                inputs=(TensorUse("c", (0, 1)), TensorUse("", (1, 2))), combine=PRODUCT.combine, sizes=PRODUCT.sizes
            ),
        ),
    ),
    is_dataflow=True,
)


def decided(*rewrites):
    plan = Plan(planner="p", rewrites=rewrites, iteration=rewritten(STEP, rewrites), lower_bound_s=1.0)
    return decisions_of(STEP, plan)


def test_a_computation_cut_alone_is_a_decision_of_its_own():
    found = decided(Split("a", 2, 4))
    assert [msgspec.to_builtins(held) for held in found] == [
        {
            "comm": "a",
            "substitution": None,
            "groups": None,
            "split_dim": 1,
            "num_chunks": 4,
            "fused_with": (),
            "prefetch": 0,
            "is_computation": True,
        }
    ]
    assert decision_text(found[0]) == "in 4 pieces along 1; a computation"
    assert decisions_headline(found) == "0 collectives changed, 1 computation cut alone"


def test_pieces_that_are_summed_lie_along_no_dimension():
    found = decided(Split("a", 1, 2))
    assert (found[0].split_dim, found[0].num_chunks) == (None, 2)
    assert decision_text(found[0]) == "in 2 pieces that are summed; a computation"


def test_a_piece_that_is_cut_again_adds_to_its_whole():
    assert decided(Split("a", 0, 2), Split("a#1", 0, 4))[0].num_chunks == 5


def test_a_computation_cut_with_its_collective_is_the_collectives_decision():
    found = decided(Split("c", 0, 2, after=(ChainLink("b", 0),)), Split("a", 0, 2))
    assert [(held.comm, held.num_chunks, held.is_computation) for held in found] == [
        ("c", 2, False),
        ("a", 2, True),
    ]
