"""FSDP2's settings of a plan in words: the calls, what each is predicted to bring, and what is not advised.

And what no plan of this step says, but other keys of its job would gain: `lagom simulate` asks the same.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lagom_overlap.errors import LagomError
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.planners.base import Plan
from lagom_overlap.planners.effects import MIN_GAIN, SwitchAdvice, as_sets
from lagom_overlap.planners.fsdp2 import set_settings
from lagom_overlap.units import format_percent, format_seconds
from lagom_overlap.verbs.simulate_what_if import MAX_SLOTS, switched_layouts
from lagom_overlap.workload.fsdp2.settings import Fsdp2Settings


def fsdp2_lines(plan: Plan) -> tuple[str, ...]:
    """The settings for a terminal and the report."""
    if isinstance(plan.settings, Fsdp2Settings) and not plan.effects:  # read from a file: nothing was searched
        words = [f"  {words}" for words, _ in set_settings(plan.settings)]
        return ('apply_fsdp2(model, Path("plan.toml")), after fully_shard:', *words) if words else ()
    if not plan.effects and plan.settings is None:
        head = ["The settings stay as they are: no other gains 1 % of this step within the memory"]
    else:
        head = ['apply_fsdp2(model, Path("plan.toml")), after fully_shard:'] if plan.effects else []
    others = ("tried and not advised:", *map(_line, plan.not_advised)) if plan.not_advised else ()
    return (*head, *map(_line, plan.effects), *others)


def key_notes(job: JobStep, settings: Fsdp2Settings | None) -> Iterator[str]:
    """Keys of a job that gain on its iteration with a plan's settings, and are none of FSDP2's; each alone."""
    keys: dict[str, Any] = {} if settings is None else settings.keys()
    try:
        planned = replace(job, layout=replace(job.layout, **keys)) if keys else job
    except LagomError:  # settings that no keys say
        return
    if planned.layout.num_micro_batches * planned.layout.num_chunks > MAX_SLOTS:
        return
    for change, _, switched in switched_layouts(planned):
        other = replace(planned, layout=replace(planned.layout, **switched))
        if keys.keys() & switched or not other.fits:
            continue
        try:
            gain = 1 - other.times.iteration_s / planned.times.iteration_s
        except LagomError:
            continue
        if gain > MIN_GAIN:
            yield (
                f"Not of this plan, but a key of the job: --set {as_sets(switched)} ({change}) takes "
                f"{format_percent(gain)} off the iteration, as lagom simulate predicts it."
            )


def _line(one: SwitchAdvice) -> str:
    gain = format_percent(one.gain, signed=True)
    key = f" [{one.key}]" if one.key else ""
    before, after = format_seconds(one.without_s), format_seconds(one.with_s)
    times = f" ({before} -> {after})" if before != after else ""  # 0.1 % shows in no three digits
    return f"{gain:>8} {one.switch}{key}{times}"
