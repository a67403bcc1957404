"""FSDP2's settings of a plan in words: the calls, what each is predicted to bring, and what is not advised."""

from lagom_overlap.planners.base import Plan
from lagom_overlap.planners.effects import SwitchAdvice
from lagom_overlap.units import format_percent, format_seconds


def fsdp2_lines(plan: Plan) -> tuple[str, ...]:
    """The settings for a terminal and the report."""
    if not plan.effects and plan.settings is None:
        head = ["The settings stay as they are: no other gains 1 % of this step within the memory"]
    else:
        head = ['apply_fsdp2(model, Path("plan.toml")), behind fully_shard:'] if plan.effects else []
    return (*head, *map(_line, plan.effects), *(f"{_line(one)}: not advised" for one in plan.not_advised))


def _line(one: SwitchAdvice) -> str:
    gain = format_percent(one.gain, signed=True)
    key = f" [{one.key}]" if one.key else ""
    return f"{gain:>8} {one.switch}{key} ({format_seconds(one.without_s)} -> {format_seconds(one.with_s)})"
