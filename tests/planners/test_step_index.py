import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.planners.finish import order_by
from lagom_overlap.planners.step_index import StepIndex
from lagom_overlap.workload import CommOp, CompOp, Iteration, MemoryBound, Op, Origin, Phase


def _comp(name: str, phase: Phase, *deps: str) -> CompOp:
    return CompOp(name=name, work=MemoryBound(8), deps=deps, origin=Origin(phase=phase))


def _comm(name: str, kind: CollectiveKind, *deps: str) -> CommOp:
    return CommOp(name=name, collective=Collective(kind, 8, 2), deps=deps, origin=Origin(phase=Phase.BACKWARD))


def _step(*ops: Op) -> Iteration:
    return Iteration("step", ops, is_dataflow=True)


def test_gradients_are_told_by_what_makes_them_and_by_who_needs_them() -> None:
    """A scatter of copies that no phase tells apart, the sum over replicas behind it, then clipping, then updates."""
    step = _step(
        _comp("data", Phase.BACKWARD),
        _comm("activation", CollectiveKind.ALL_REDUCE, "data"),
        _comp("copy", Phase.BACKWARD, "activation"),
        _comm("scatter", CollectiveKind.REDUCE_SCATTER, "copy"),
        _comm("sum", CollectiveKind.ALL_REDUCE, "scatter"),
        _comp("weight", Phase.WEIGHT_GRAD, "activation"),
        _comm("other", CollectiveKind.ALL_REDUCE, "weight"),
        _comp("square", Phase.OPTIMIZER, "sum"),
        _comm("norm", CollectiveKind.ALL_REDUCE, "square"),
        _comp("update", Phase.OPTIMIZER, "sum", "norm"),
    )
    assert [op.name for op in StepIndex(step).gradient_comms] == ["scatter", "sum", "other"]


def test_what_is_reached_stays_before_a_place() -> None:
    step = _step(
        _comp("a", Phase.FORWARD),
        _comp("b", Phase.FORWARD, "a"),
        _comp("c", Phase.FORWARD, "b"),
        _comp("d", Phase.FORWARD, "c"),
    )
    assert StepIndex(step).reached(["a"], 2) == {"b", "c"}


def test_the_lowest_rank_goes_first_as_far_as_the_data_flow_allows() -> None:
    step = _step(_comp("a", Phase.FORWARD), _comp("b", Phase.FORWARD, "a"), _comp("c", Phase.FORWARD))
    assert order_by(step, {"c": -1.0, "b": -2.0}) == ("c", "a", "b")
    assert order_by(step, {"c": -1.0}, [("c", "b")]) == ("a", "b", "c")


def test_waits_that_go_round_in_a_circle_are_refused() -> None:
    step = _step(_comp("a", Phase.FORWARD), _comp("b", Phase.FORWARD, "a"))
    with pytest.raises(JobError, match="round in a circle through 'a'"):
        order_by(step, {}, [("a", "b")])
