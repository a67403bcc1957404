"""What `lagom plan --for megatron` advises on published recipes, against what the recipes switch on.

    python benchmarks/recipe_advice.py training_steps_shown.csv [--into docs/recipes.md] [--seconds 60]

A row of the table of published training steps (Megatron-Bridge, NeMo; facts of each recipe:
`training_steps/recipes.py`, `training_steps/nemo_recipes.py`) is a job: one per model, GPU, precision and degrees, of
the latest release. From its degrees with every overlap switch as Megatron-LM has it by default (and no interleaving,
where that fits) the switches are searched. Where the advice and the recipe differ, the difference has its predicted
figure: the share that the switch takes off the iteration (negative: adds to it), all others as advised.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lagom_overlap.cost.operators import load_framework, load_operators
from lagom_overlap.cost.profile import load_profile
from lagom_overlap.errors import LagomError
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.megatron.search import Found, SwitchEffect, SwitchVerdict
from lagom_overlap.units import format_memory, format_percent, format_seconds
from lagom_overlap.verbs.plan_megatron import by_default, found_switches, with_layout
from lagom_overlap.workload.parallel import Dispatcher, ParallelLayout, PipelineSchedule
from lagom_overlap.workload.step import load_rules
from measured_rows import BadRowError, NotModelledError, read
from training_steps.case import COLUMNS, StepCase
from training_steps.jobs import case_of

FRAMEWORKS: Final = ("Megatron-Bridge", "NeMo/Megatron")
HEAD: Final = ("recipe", "measured", "recipe, predicted", "defaults", "advised", "where advice and recipe differ")


EQUAL: Final = "equal"
ABOUT: Final = """# Advice against published recipes

Written by `benchmarks/recipe_advice.py` from the published training steps of Megatron-Bridge and NeMo, one row
per model, GPU, precision and degrees, of the latest release that prints it. What each recipe switches on was
read in NVIDIA's sources (`benchmarks/training_steps/recipes.py`, `nemo_recipes.py`, by release and commit).
`lagom plan` is given the recipe's degrees, layers per stage, precision, recomputation and CUDA graphs with
every overlap switch as Megatron-LM has it by default, and searches.

"Measured" is the publisher's; all other times are predicted, of whole iterations: with the recipe's switches,
with Megatron-LM's defaults, with the advised ones. A difference has its predicted figure: the share of the
iteration that the switch takes off (negative: adds), all others as advised, and its bounds by the model's own
error. Where the bounds hold zero the model cannot tell the two apart. No row here measures a recipe's choice
against another one: where the advice differs, it is a prediction, and the recipe may be right for what is not
modelled (memory of user buffers, a switch's maturity in that release). All-to-alls behind another micro-batch,
which the advice adds to DeepSeek-V3 and Qwen3-30B of releases up to 26.04, are in their MXFP8 recipes on GB200
and GB300 from 26.06 on.

{num_equal} of {num} recipes are advised as they are.

"""


def page(lines: Sequence[str], num_equal: int) -> str:
    """The table with what it is about."""
    head = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    return ABOUT.format(num_equal=num_equal, num=len(lines)) + "\n".join((*head, *lines)) + "\n"


def job_of(case: StepCase) -> JobStep:
    """The published job as `lagom simulate` has it."""
    rules, framework = load_rules(case.framework), load_framework(case.framework)
    return JobStep(
        model=case.model,
        layout=case.layout,
        cluster=case.cluster,
        seq_len=case.seq_len,
        rules=rules,
        precision=case.precision,
        clips=rules.clips,
        framework=framework.graphed() if case.graphed else framework,
        operators=load_operators(case.cluster.gpu),
        profile=load_profile("plausible"),
        sm_carveout=None,
        rank_skew_s=0.0,
        says_fsdp=False,
    )


def start_of(job: JobStep) -> JobStep:
    """The job with every overlap switch off, as a launch that says nothing has it; not interleaved, if that fits."""
    layout = by_default(job)
    off: dict[str, Any] = {"overlap_experts": False}
    if layout.dispatcher is Dispatcher.MERGED:
        off["dispatcher"] = Dispatcher.ALL_TO_ALL
    plain: dict[str, Any] = {"schedule": PipelineSchedule.ONE_F_ONE_B, "chunks": 1, "overlap_p2p": False}
    tries: list[dict[str, Any]] = [off]
    if not layout.pipeline_layout:
        tries.insert(0, {**off, **plain, "micro_batch_group": 0})
    for changes in tries:
        other = with_layout(job, replace(layout, **changes))
        if other is not None and other.fits:
            return other
    return job


def distinct(cases: Sequence[StepCase]) -> Iterator[StepCase]:
    """One case per model, GPU, precision and degrees: the first, which is the latest release's."""
    seen = set()
    for case in cases:
        layout: ParallelLayout = case.layout
        degrees = (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.data)
        key = (case.model.name, case.cluster.gpu.name, str(case.precision.products), degrees, case.seq_len)
        if key not in seen:
            seen.add(key)
            yield case


def differences(found: Found) -> list[str]:
    """Each switch of which the recipe and the advice differ, with its figure."""
    return [_difference(one) for one in found.switches if one.in_job != one.advised]


def _difference(one: SwitchEffect) -> str:
    who = "the recipe has" if one.in_job else "advised"
    if one.verdict is SwitchVerdict.TOO_LARGE:
        return f"{who} {one.switch}: does not fit here, {format_memory(one.memory_bytes or 0)}"
    if one.share is None:
        return f"{who} {one.switch}: not tried"
    gain = format_percent(one.share, signed=True)
    low, high = (None if share is None else format_percent(share, signed=True) for share in (one.low, one.high))
    sure = "" if low is None or high is None else f", {low} to {high}"
    return f"{who} {one.switch}: {gain} ({one.verdict}{sure})"


def row_of(case: StepCase, seconds: float) -> tuple[str, ...]:
    """A recipe's line of the table."""
    recipe = job_of(case)
    start = start_of(recipe)
    found = found_switches(start, Deadline(seconds))
    told = found_switches(recipe, Deadline(seconds), wanted=found.layout)
    advised = with_layout(recipe, found.layout)
    assert advised is not None
    times = [case.measured_s, *(job.times.iteration_s for job in (recipe, start, advised))]
    cut = " (search ended by the clock)" if found.was_cut else ""
    return (
        f"{case.what} {case.precision.products}",
        *map(format_seconds, times),
        "; ".join(differences(told)) + cut or EQUAL,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 2 where the file is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="the table of published training steps")
    parser.add_argument("--into", type=Path, help="a file for the table")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each recipe's search")
    asked = parser.parse_args(arguments)
    cases = []
    for row in read(asked.table, COLUMNS)[1]:
        if row.text("framework") in FRAMEWORKS:
            try:
                cases.append(case_of(row))
            except (LagomError, BadRowError, NotModelledError):
                continue
    lines: list[str] = []
    num_equal = 0
    for case in distinct(cases):
        try:
            cells = row_of(case, asked.seconds)
        except LagomError as error:
            cells = (case.what, "", "", "", "", str(error))
        line = f"| {' | '.join(cells)} |"
        num_equal += cells[-1] == EQUAL
        print(line, flush=True)
        lines.append(line)
        if asked.into is not None:
            asked.into.write_text(page(lines, num_equal), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
