"""What the cost model estimates where a trace has no uncontended twin, as `lagom analyze --json` prints it."""

import msgspec

from lagom_overlap.analysis.estimate import FillIn
from lagom_overlap.trace.gpu_trace import NS_PER_S


class FillInJson(msgspec.Struct, frozen=True, kw_only=True):
    """Estimates: kernels without a twin, `run_s` in all, would take `alone_s` alone; `left_s` stays open."""

    estimated_by: str
    num_runs: int
    run_s: float
    alone_s: float
    stretched_s: float
    left_s: float


def fill_in_json(filled: FillIn) -> FillInJson:
    """The estimate as it is printed."""
    return FillInJson(
        estimated_by=f"cost model, profile {filled.profile}",
        num_runs=filled.num_runs,
        run_s=filled.run_ns / NS_PER_S,
        alone_s=filled.alone_ns / NS_PER_S,
        stretched_s=filled.stretched_ns / NS_PER_S,
        left_s=filled.left_ns / NS_PER_S,
    )
