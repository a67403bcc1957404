"""Ranked layouts in words."""

from collections.abc import Mapping
from typing import Any, Final

from lagom_overlap.results.layouts import LayoutRow, LayoutsResult
from lagom_overlap.units import format_memory, format_seconds

_DEGREES: Final = {"tensor": "TP", "context": "CP", "pipeline": "PP", "expert": "EP", "data": "DP", "fsdp": "FSDP"}
_TOLD_OTHERWISE: Final = (
    *("framework", "chunks", "schedule", "sequence_parallel", "overlap_gradients", "overlap_parameters", "overlap_p2p"),
    *("whole_experts", "global_batch", "recompute_modules", "tables_as_layers", "pipeline_layout"),
)
"""Keys that follow from others in a ranking, or are told with them."""


def layout_text(keys: Mapping[str, Any], *, is_ranking: bool) -> str:
    """The keys of a row: of a ranking as people write layouts (TP8 PP4x5 DP2), of variants as they stand."""
    if not is_ranking:
        return ", ".join(f"{key} = {_value(value)}" for key, value in keys.items())
    degrees = [f"{name}{keys[key]}" for key, name in _DEGREES.items() if keys.get(key, 1) != 1]
    if "chunks" in keys:
        place = next(number for number, text in enumerate(degrees) if text.startswith("PP"))
        degrees[place] += f"x{keys['chunks']}"
    said = [f"{keys.get('framework', '')} {' '.join(degrees) or 'one GPU'}".strip()]
    if keys.get("zero_stage"):
        said.append(f"ZeRO-{keys['zero_stage']}")
    said.append(f"micro-batch {keys.get('micro_batch', 1)}")
    if "recompute" in keys:
        modules = "+".join(keys.get("recompute_modules", ()))
        said.append(f"recompute {modules or keys['recompute']}")
    known = {*_DEGREES, *_TOLD_OTHERWISE, "zero_stage", "micro_batch", "recompute"}
    said += [f"{key} = {_value(value)}" for key, value in keys.items() if key not in known]
    return ", ".join(said)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "+".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def headline(result: LayoutsResult) -> str:
    """The fastest, in one sentence."""
    row = result.rows[0]
    return f"{layout_text(row.keys, is_ranking=result.is_ranking)}: {row_text(row)}"


def row_text(row: LayoutRow) -> str:
    """What a row's job takes."""
    return (
        f"{format_seconds(row.iteration_s)} per iteration, {row.tokens_per_s:,.0f} tokens/s, "
        f"MFU {100 * row.mfu:.1f} %, {format_memory(row.memory_bytes)} per GPU"
    )


def size_text(result: LayoutsResult) -> str:
    """Model, GPUs and what was looked at."""
    what = "layouts" if result.is_ranking else "variants"
    gpus = f"{result.num_gpus} GPU{'s' if result.num_gpus > 1 else ''}"
    gpus = gpus if len({row.num_gpus for row in result.rows}) == 1 else "several numbers of GPUs"
    work = f", {result.global_batch} sequences of {result.seq_len} tokens" if result.same_work else ""
    return (
        f"{result.model} on {gpus} ({result.cluster}){work}: {result.num_layouts} {what}, {len(result.rows)} simulated"
    )


def order_text(result: LayoutsResult) -> str:
    """What the order is, where seconds per iteration do not say; "" where they do."""
    if result.same_work:
        return ""
    return "The variants train different numbers of tokens per iteration: the order is by tokens per second."


def certainty(result: LayoutsResult) -> str:
    """Which of the rows are the fastest of all; "" where all were simulated."""
    if result.interrupted:
        return "Interrupted: these were simulated by then, and faster ones may be missing."
    if result.num_certain and result.num_certain < len(result.rows):
        first = "one" if result.num_certain == 1 else result.num_certain
        return f"No layout that was not simulated can be faster than the first {first}: its computation takes longer."
    return ""


def next_line(result: LayoutsResult) -> str:
    """What to type next."""
    files = {path.name: path for path in result.files}
    return f"lagom simulate {files['best.toml']}" if files else ""


def summary(result: LayoutsResult) -> str:
    """The fastest layout, what was looked at, and the caveats."""
    head = f"{result.job}: {headline(result)}"
    said = (head, f"{size_text(result)}.", order_text(result), certainty(result), *result.notes)
    return "\n".join(filter(None, said))
