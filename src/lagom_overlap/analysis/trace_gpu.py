"""The machine that a trace was recorded on: the one that the user names, or as far as a preset knows it.

The GPU is then the preset whose model stands as a word in the trace's name ("NVIDIA H100 PCIe" -> H100), with the
trace's own number of SMs: a card with another memory is taken for its sister.
"""

import re
from dataclasses import replace
from functools import lru_cache

from lagom_overlap.hardware import Cluster, Gpu, load_preset, preset_names
from lagom_overlap.trace.gpu_trace import GpuTrace


@lru_cache
def _cluster_named_in(gpu_name: str) -> Cluster | None:
    clusters = [load_preset(name) for name in preset_names()]
    named = (cluster for cluster in clusters if re.search(rf"\b{re.escape(_model(cluster.gpu))}\b", gpu_name))
    return next(named, None)


def _model(gpu: Gpu) -> str:
    """What makes one model of a GPU: `"A100"` of `"A100-SXM4-80GB"`."""
    return gpu.name.partition("-")[0]


def cluster_of_trace(trace: GpuTrace, named: Cluster | None = None) -> Cluster | None:
    """The machine named, or the preset of the trace's GPU, with the trace's number of SMs; None where no preset has it.

    Of several presets with that GPU the first by name: their wires differ, and a trace says nothing of wires.
    """
    cluster = named or _cluster_named_in(trace.gpu_name)
    if cluster is None or trace.num_sms in (None, cluster.gpu.num_sms):
        return cluster
    sister = replace(cluster.gpu, num_sms=trace.num_sms, gpc_sms=(), gpc_first_sms=())  # GPCs are of the one measured
    return replace(cluster, gpu=sister)
