"""`lagom list KIND`: what a key or a flag takes."""

import argparse

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lagom_overlap.cli.output import show
from lagom_overlap.cli.stdout import say
from lagom_overlap.report.fitted_table import Fitted
from lagom_overlap.results.base import Cell
from lagom_overlap.units import format_memory
from lagom_overlap.verbs.listing import Listed, run_list

_HEADS = {
    "num_params": "parameters",
    "num_active_params": "active",
    "num_layers": "layers",
    "num_experts": "experts",
    "gpus_per_node": "per node",
    "intra_bytes_per_s": "GB/s in a node",
    "inter_bytes_per_s": "GB/s between nodes",
    "num_sms": "SMs",
    "memory_bytes": "memory",
    "hbm_bytes_per_s": "HBM GB/s",
    "gemm_flops": "TFLOP/s",
    "what": "",
}
"""Heads of the columns that people read under another name than the JSON's."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the verb and returns the exit code."""
    result = run_list(Listed(arguments.kind))
    if arguments.json:
        say(result.to_json())
        return 0
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, cell in result.rows[0].items():
        is_text = isinstance(cell, str)
        justify = "left" if is_text else "right"
        table.add_column(_HEADS.get(name, name), justify=justify, no_wrap=not is_text or name == "name")  # type: ignore[arg-type]  # rich's literal
    for row in result.rows:
        table.add_row(*(Text(_text(name, cell)) for name, cell in row.items()))
    show(Group(Fitted(table), Text(), Text(result.use)))
    return 0


def _text(name: str, cell: Cell) -> str:
    if isinstance(cell, str) or cell is None:
        return cell or ""
    if name in ("num_params", "num_active_params"):
        return f"{cell / 1e9:.1f} B"
    if name == "memory_bytes":
        return format_memory(int(cell))
    if name.endswith("bytes_per_s"):
        return f"{cell / 1e9:,.0f}"
    return f"{cell / 1e12:,.0f}" if name == "gemm_flops" else f"{cell:,}" if cell else ""
