"""A job's script with the order that Inductor gives the operators of each rank's compiled graphs, printed.

For a graph with collectives, each candidate of Inductor's `reorder_for_peak_memory` (private; PyTorch 2.15) is a line:
the rank, the candidate, its estimated peak in bytes, and its order of F attention, A its backward, G gathers, S
all-to-alls, w waits. The least peak is taken. With KEEP=1 the order stays as written ("baseline") on all ranks.

    torchrun --nproc-per-node 8 inductor_orders.py SCRIPT ...
"""

import os
import runpy
import sys

from torch._inductor import memory

MARKS = {
    "flash_attention_backward": "A",
    "flash_attention": "F",
    "all_gather_into_tensor": "G",
    "all_to_all_single": "S",
    "wait_tensor": "w",
}
CHOOSE = memory.reorder_for_peak_memory


def marks(nodes):
    """The order of what matters here; the first word that fits counts."""
    parts = [each.node for node in nodes for each in node.get_nodes()]
    names = [f"{getattr(part, 'op_overload', '')} {getattr(part, 'python_kernel_name', '')}" for part in parts]
    found = (next((mark for word, mark in MARKS.items() if word in name), "") for name in names)
    return "".join(found)


def choose(nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs, *others, **named):
    """Inductor's choice, after a line for each candidate."""
    peak, freed = memory.prepare_planning_info(nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs)
    if "w" in marks(nodes):
        lines = [("baseline", peak, nodes)]
        for sort in (memory.topological_sort_lpmf, memory.topological_sort_bfs, memory.topological_sort_dfs):
            needs = (freed, name_to_buf, graph_outputs) if sort is memory.topological_sort_lpmf else ()
            order = sort(nodes, *needs)
            lines.append((sort.__name__, memory.estimate_peak_memory(order, freed, graph_outputs)[0], order))
        for name, bytes_, order in lines:
            print(f"ORDER rank {os.environ.get('RANK', '0')} {name} {bytes_} {marks(order)}", flush=True)
    if os.environ.get("KEEP") == "1":
        return nodes
    return CHOOSE(nodes, name_to_buf, name_to_fused_node, graph_inputs, graph_outputs, *others, **named)


memory.reorder_for_peak_memory = choose
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
