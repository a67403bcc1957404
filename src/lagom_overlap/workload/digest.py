"""What tells graphs apart: a digest of operators and their data flow."""

import hashlib
from typing import Final

import msgspec

from lagom_overlap.workload.iteration import Iteration
from lagom_overlap.workload.ops import CommOp, Op

_SAY_NOTHING: Final = (
    ", packed=1", ", block_scaled=False", ", backward=False", ", backward=True", ", reach=0.0", ", window=0",
    ", narrow=False",
)  # fmt: skip
"""What digests of before do not have, so that plans of before fit their graphs.

Elements of whole bytes, one scale per tensor; attention's pass, which its `passes` tell, all keys, two bytes.
"""


def graph_digest(iteration: Iteration) -> str:
    """Sixteen hex digits that are equal for equal graphs: operators, what they move and compute, their data flow.

    On how many nodes a collective's ranks lie does not count: a graph is the same before and after it is placed.
    """

    def line(op: Op) -> tuple[object, ...]:
        what = op.collective.unplaced if isinstance(op, CommOp) else op.work
        said = repr(what)
        for nothing in _SAY_NOTHING:
            said = said.replace(nothing, "")
        return (op.name, said, sorted(op.deps))

    return hashlib.sha256(msgspec.json.encode([line(op) for op in iteration.ops])).hexdigest()[:16]
