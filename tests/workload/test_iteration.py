import pytest

from lagom_overlap.collective import Collective, CollectiveKind
from lagom_overlap.errors import JobError
from lagom_overlap.workload import CommOp, CompOp, Gemm, Iteration

GEMM = Gemm(8, 8, 8)
GATHER = Collective(CollectiveKind.ALL_GATHER, 1024, 8)


def test_computations_and_collectives_keep_their_order() -> None:
    ops = (
        CompOp(name="a", work=GEMM),
        CommOp(name="x", collective=GATHER),
        CompOp(name="b", work=GEMM, deps=("x",)),
        CommOp(name="y", collective=GATHER, deps=("a",)),
    )
    iteration = Iteration("step", ops)
    assert [op.name for op in iteration.computations] == ["a", "b"]
    assert [op.name for op in iteration.comms] == ["x", "y"]


def test_a_name_that_occurs_twice_is_refused() -> None:
    with pytest.raises(JobError, match="'step': operator 'a' occurs twice"):
        Iteration("step", (CompOp(name="a", work=GEMM), CommOp(name="a", collective=GATHER)))


def test_a_wait_for_an_operator_that_does_not_exist_is_refused() -> None:
    with pytest.raises(JobError, match="'a' waits for 'unknown', no operator of it"):
        Iteration("step", (CompOp(name="a", work=GEMM, deps=("unknown",)),))


@pytest.mark.parametrize("dep", ["later", "a"])
def test_a_wait_for_what_was_not_issued_before_is_refused(dep: str) -> None:
    with pytest.raises(JobError, match=f"'a' waits for '{dep}', not issued before it: a cycle"):
        Iteration("step", (CompOp(name="a", work=GEMM, deps=(dep,)), CompOp(name="later", work=GEMM)))
