"""What the machines are: GPUs, links, clusters, and presets with a source for each number."""

from lagom_overlap.hardware.cluster import Cluster, load_preset, preset_names, read_preset_file
from lagom_overlap.hardware.gpu import Gpu
from lagom_overlap.hardware.link import Link, LinkKind

__all__ = ["Cluster", "Gpu", "Link", "LinkKind", "load_preset", "preset_names", "read_preset_file"]
