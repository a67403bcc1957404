"""Which collectives add numbers: cut, fused, partitioned or replaced, they may add them in another order.

An element's order of summation depends on which segment of the buffer it lies in, so that even a cut along an axis that
nothing is summed over changes the last bits. Gathers, exchanges and transfers only move.
"""

from lagom_overlap.workload import CommOp


def adds_numbers(comm: CommOp) -> bool:
    """Whether a collective has a reduction, whose order an exact plan keeps."""
    return comm.collective.kind.traits.adds
