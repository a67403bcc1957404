"""The machine that a trace was recorded on: the one that the user names, or as far as a preset knows it.

The GPU is then the preset whose model stands as a word in the trace's name ("NVIDIA H100 PCIe" -> H100), with the
trace's own number of SMs: a card with another memory is taken for its sister.
"""

import re
from dataclasses import replace
from functools import lru_cache
from typing import Final

from lagom_overlap.errors import LagomError
from lagom_overlap.hardware import Cluster, Gpu, load_preset, preset_names
from lagom_overlap.trace.gpu_trace import GpuTrace

_FEWEST_SMS: Final = 4
"""A slice of a GPU with fewer is nothing that the model of channels and waves is made for."""


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
            gpc_sms=(),  # GPCs are of the one measured
            gpc_first_sms=(),
        )
        return replace(cluster, gpu=sister)
    except (LagomError, ValueError):  # no machine that the model knows, such as a slice of a GPU
        return None
