"""What the machines are: GPUs, links, clusters, and presets with a source for each number."""

from lagom_overlap.hardware.cluster import Cluster, Link, LinkKind, load_preset, preset_names
from lagom_overlap.hardware.gpu import Gpu
from lagom_overlap.hardware.gpu_file import gpu_names, load_gpu

__all__ = ["Cluster", "Gpu", "Link", "LinkKind", "gpu_names", "load_gpu", "load_preset", "preset_names"]
