"""Megatron-LM's file for `--tp-comm-overlap-cfg`: how Transformer Engine overlaps each product of a layer.

Transformer Engine (`initialize_ub` in pytorch/module/base.py) knows these products and methods: a ring exchange of
gathered pieces around a product, a pipeline of pieces that are scattered behind one, and a collective in bulk under a
product that does not need it. The numbers of SMs are those that the prediction assumes of registered buffers.
"""

from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.planners.base import PlanProblem
from lagom_overlap.planners.megatron.flags import MegatronFlags
from lagom_overlap.planners.megatron.userbuffers import fabric_of, userbuffer_sms

TP_OVERLAP_FILE: Final = "tp_comm_overlap.yaml"
_RING: Final = ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")
_PIPELINE: Final = ("proj_fprop", "fc2_fprop")
_BULK: Final = {
    "qkv_dgrad": CollectiveKind.ALL_GATHER,
    "qkv_wgrad": CollectiveKind.REDUCE_SCATTER,
    "fc1_dgrad": CollectiveKind.ALL_GATHER,
    "fc1_wgrad": CollectiveKind.REDUCE_SCATTER,
}
"""Under the product for the input's gradient the saved input is gathered, under the weight's the other is scattered."""


def tp_overlap_yaml(problem: PlanProblem, flags: MegatronFlags) -> bytes:
    """The file for switches with `--tp-comm-overlap`."""
    sms = {kind: _sms(problem, kind) for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)}
    lines = ["# Written by lagom plan --for megatron, for --tp-comm-overlap-cfg."]
    for name in _RING:
        lines += [f"{name}:", "  method: ring_exchange", "  aggregate: 0"]
    scattered = sms[CollectiveKind.REDUCE_SCATTER]
    for name in _PIPELINE:
        lines += [f"{name}:", "  method: pipeline", f"  num_sm: {scattered}", f"  num_splits: {flags.tensor_splits}"]
    for name, kind in _BULK.items():
        lines += [f"{name}:", "  method: bulk", f"  num_sm: {sms[kind]}"]
    return ("\n".join(lines) + "\n").encode()


def _sms(problem: PlanProblem, kind: CollectiveKind) -> int:
    found = [
        userbuffer_sms(kind, fabric_of(op.collective, problem.cluster), sharp=False)
        for op in problem.iteration.comms
        if op.collective.kind is kind and op.communicator == "tp"
    ]
    return max(found, default=1)
