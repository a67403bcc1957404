"""Names of the streams that operators are issued on, in built and in captured steps alike.

FSDP2's are those of `FSDPCommContext` (PyTorch 2.13, `_fsdp_param_group.py`): copies into a gather's buffer, gathers,
reductions of sharded gradients, and the sums over replicas of hybrid sharding each have their own. Copies out of a
gather's buffer and into a reduction's are computations. A process group that the framework gives no stream of its own
runs on NCCL's, which is named after the communicator.
"""

from typing import Final

COMPUTE: Final = "compute"
"""The stream of computations, and of what the framework puts on no stream of its own."""
COMM: Final = "comm"
"""One stream for all collectives: of frameworks that have no more, and of steps that nobody has issued yet."""
ALL_GATHER_COPY_IN: Final = "all_gather_copy_in"
ALL_GATHER: Final = "all_gather"
REDUCE_SCATTER: Final = "reduce_scatter"
ALL_REDUCE: Final = "all_reduce"
FSDP2: Final = (ALL_GATHER_COPY_IN, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
"""FSDP2's own streams, in the order in which it makes them."""
DDP_REDUCER: Final = "ddp_reducer"
"""NCCL's stream of the group over which DDP reduces its buckets; of a second group, a name that begins so."""
COPY_ENGINE: Final = "copy"
"""Computations on it are transfers that a copy engine makes (offloading, peer copies)."""
