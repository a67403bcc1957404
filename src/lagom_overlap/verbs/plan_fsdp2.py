"""FSDP2's settings of a plan in words: the calls, what each is predicted to bring, and what is not advised."""

from lagom_overlap.planners.base import Plan
from lagom_overlap.planners.effects import SwitchAdvice
from lagom_overlap.planners.fsdp2 import set_settings
from lagom_overlap.units import format_percent, format_seconds
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings


def fsdp2_lines(plan: Plan) -> tuple[str, ...]:
    """The settings for a terminal and the report."""
    if isinstance(plan.settings, Fsdp2Settings) and not plan.effects:  # read from a file: nothing was searched
        words = [f"  {words}" for words, _ in set_settings(plan.settings)]
        return ('apply_fsdp2(model, Path("plan.toml")), behind fully_shard:', *words) if words else ()
    if not plan.effects and plan.settings is None:
        head = ["FSDP2's own settings stay: none gains 1 % of this step within the memory"]
    else:
        head = ['apply_fsdp2(model, Path("plan.toml")), behind fully_shard:'] if plan.effects else []
    others = ("tried and not advised:", *map(_line, plan.not_advised)) if plan.not_advised else ()
    return (*head, *map(_line, plan.effects), *others)


def _line(one: SwitchAdvice) -> str:
    gain = format_percent(one.gain, signed=True)
    return f"{gain:>8} {one.switch} ({format_seconds(one.without_s)} -> {format_seconds(one.with_s)})"
