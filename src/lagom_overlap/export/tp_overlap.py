"""Megatron-LM's file for `--tp-comm-overlap-cfg`: how Transformer Engine overlaps each product of a layer.

Transformer Engine (`initialize_ub` in pytorch/module/base.py) knows these products and methods: a ring exchange of
gathered pieces around a product, a pipeline of pieces that are scattered behind one, and a collective in bulk under a
product that does not need it. The numbers are NVIDIA's own, `[[user_buffers]]` of the framework's file: those published
for the GPU's generation, the format of products, and the nearest hidden size.
"""

from dataclasses import dataclass
from typing import Final

from lagom_overlap.hardware import Gpu
from lagom_overlap.toml_tables import from_table
from lagom_overlap.workload.precision import Precision
from lagom_overlap.workload.step.framework_file import framework_file

TP_OVERLAP_FILE: Final = "tp_comm_overlap.yaml"
_RING: Final = ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")
_BULK: Final = ("qkv_dgrad", "qkv_wgrad", "fc1_dgrad", "fc1_wgrad")
_SCATTERED: Final = ("proj_fprop", "fc2_fprop")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserBuffers:
    """SMs of each product's collective in one of NVIDIA's files.

    `proj_fprop` and `fc2_fprop` 0: a ring exchange on one SM in place of a pipeline of `num_splits` pieces. All but
    plain ring exchanges run in clusters of `cga_size` blocks, and scattered products leave their SMs free
    (`set_sm_margin`).
    """

    gpus: tuple[str, ...]
    narrow: bool
    hidden: int
    qkv_dgrad: int
    qkv_wgrad: int
    fc1_dgrad: int
    fc1_wgrad: int
    proj_fprop: int
    fc2_fprop: int
    num_splits: int = 4
    cga_size: int = 2


def user_buffers(framework: str, gpu: Gpu, hidden: int, precision: Precision) -> UserBuffers:
    """NVIDIA's numbers for the nearest hidden size; for a GPU without any, the file's first GPU's."""
    tables = framework_file(framework).user_buffers
    rows = [
        from_table(table, UserBuffers, f"frameworks/{framework}.toml", f"user_buffers[{number}].")
        for number, table in enumerate(tables)
    ]
    name, is_narrow = gpu.name.lower(), precision.products.is_narrow
    of_gpu = [row for row in rows if name.startswith(row.gpus)] or [row for row in rows if row.gpus == rows[0].gpus]
    return min((row for row in of_gpu if row.narrow is is_narrow), key=lambda row: abs(row.hidden - hidden))


def tp_overlap_yaml(framework: str, gpu: Gpu, hidden: int, precision: Precision) -> bytes:
    """The file for a model of that hidden size."""
    row = user_buffers(framework, gpu, hidden, precision)
    lines = [
        "# Written by lagom plan --for megatron, for --tp-comm-overlap-cfg.",
        f"# NVIDIA's numbers for {row.gpus[0].upper()}, hidden size {row.hidden}, "
        f"{'FP8' if row.narrow else 'BF16'} products; not measured here.",
    ]
    for name in _RING:
        lines += [f"{name}:", "  method: ring_exchange", "  aggregate: 0"]
    for name in _SCATTERED:
        num_sms = getattr(row, name)
        lines += [f"{name}:"]
        if num_sms:
            lines += ["  method: pipeline", f"  num_sm: {num_sms}", f"  cga_size: {row.cga_size}"]
            lines += [f"  num_splits: {row.num_splits}", "  set_sm_margin: 1"]
        else:
            lines += ["  method: ring_exchange", "  num_sm: 1", "  set_sm_margin: 1"]
    for name in _BULK:
        lines += [f"{name}:", "  method: bulk", f"  num_sm: {getattr(row, name)}", f"  cga_size: {row.cga_size}"]
        lines += ["  set_sm_margin: 0"]
    return ("\n".join(lines) + "\n").encode()
