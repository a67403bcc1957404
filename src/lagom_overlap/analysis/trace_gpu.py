"""The machine that a trace was recorded on: the one that the user names, or as far as a preset knows it.

The GPU is then the preset whose model stands as a word in the trace's name ("NVIDIA H100 PCIe" -> H100), with the
trace's own number of SMs: a card with another memory is taken for its sister.
"""

import re
from dataclasses import replace
from functools import lru_cache
from math import log
from typing import Final

from lagom_overlap.errors import LagomError
from lagom_overlap.hardware import Cluster, Gpu, load_preset, preset_names
from lagom_overlap.trace.gpu_trace import GpuTrace

_FEWEST_SMS: Final = 4
"""A slice of a GPU with fewer is nothing that the model of channels and waves is made for."""
_USUAL_NODE: Final = 8
"""A preset may stand for the traced machine if its nodes have as many GPUs as the trace has ranks, or this many."""
_NEAR: Final = 2.0
"""A GPU with more than twice or less than half the SMs is no stand-in. Chosen, not measured."""


@lru_cache
def _cluster_named_in(gpu_name: str) -> Cluster | None:
    clusters = [load_preset(name) for name in preset_names()]
    named = (cluster for cluster in clusters if re.search(rf"\b{re.escape(_model(cluster.gpu))}\b", gpu_name))
    return next(named, None)


def _model(gpu: Gpu) -> str:
    """What makes one model of a GPU: `"A100"` of `"A100-SXM4-80GB"`."""
    return gpu.name.partition("-")[0]


def nearest_cluster(trace: GpuTrace, num_ranks: int) -> Cluster | None:
    """The preset of the same maker whose GPU has the number of SMs nearest to the trace's, with that number.

    Its nodes hold all of a communicator's ranks, or eight. None where the trace names no GPU or number of SMs, or none
    is within `_NEAR` of it. All but the SMs is the preset's: a fit to the trace finds the wire; memory bandwidth and
    cache stay another GPU's.
    """
    if not trace.gpu_name or not trace.num_sms or trace.num_sms < _FEWEST_SMS:
        return None
    is_amd = re.search(r"\bAMD\b|Instinct|\bMI\d", trace.gpu_name) is not None
    clusters = [load_preset(name) for name in preset_names()]
    alike = [
        cluster
        for cluster in clusters
        if cluster.gpu.name.startswith("MI") == is_amd and cluster.gpus_per_node >= min(num_ranks, _USUAL_NODE)
    ]
    ratio = {cluster.name: abs(log(cluster.gpu.num_sms / trace.num_sms)) for cluster in alike}
    nearest = min(alike, key=lambda cluster: ratio[cluster.name])
    return cluster_of_trace(trace, nearest) if ratio[nearest.name] <= log(_NEAR) else None


def cluster_of_trace(trace: GpuTrace, named: Cluster | None = None) -> Cluster | None:
    """The machine named, or the preset of the trace's GPU, with the trace's number of SMs; None where no preset has it.

    Of several presets with that GPU the first by name: their wires differ, and a trace says nothing of wires.
    """
    cluster = named or _cluster_named_in(trace.gpu_name)
    if cluster is None or trace.num_sms is None or trace.num_sms == cluster.gpu.num_sms:
        return cluster
    if trace.num_sms < _FEWEST_SMS:
        return None
    gpu = cluster.gpu
    xcds = max(1, round(gpu.num_xcds * trace.num_sms / gpu.num_sms))  # a partition has some of the chiplets
    try:
        sister = replace(
            gpu,
            num_sms=trace.num_sms,
            num_xcds=1 if trace.num_sms % xcds else xcds,
            channel_xcds=0,  # whole GPUs, too
            gpc_sms=(),  # GPCs are of the one measured
            gpc_first_sms=(),
        )
        return replace(cluster, gpu=sister)
    except (LagomError, ValueError):  # no machine that the model knows, such as a slice of a GPU
        return None
