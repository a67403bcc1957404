"""What `lagom plan` advises on published recipes, against what the recipes switch on.

    python benchmarks/recipe_advice.py training_steps_shown.csv [--into docs/recipes.md] [--seconds 60]

A row of the table of published training steps (Megatron-Bridge, NeMo; facts of each recipe:
`training_steps/recipes.py`, `training_steps/nemo_recipes.py`) is a job: one per model, GPU, precision and degrees, of
the latest release. From its degrees with every overlap switch as Megatron-LM has it by default (and no interleaving,
where that fits) the switches are searched. Where the advice and the recipe differ, the difference has its predicted
figure: the share that the switch takes off the iteration (negative: adds to it), all others as advised. torchtitan's
rows are jobs of FSDP2 with its own settings, which the advice is told beside. Every advice is typed as `--set` takes
it: the job with it must be accepted, and take the time that the advice says.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from lagom_overlap.cost.operators import load_framework, load_operators
from lagom_overlap.cost.profile import load_profile
from lagom_overlap.errors import LagomError
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.memory import check_memory
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.jobfile.variants import JobVariants
from lagom_overlap.planners.deadline import Deadline
from lagom_overlap.planners.megatron.switch_search import Found, SwitchEffect, SwitchVerdict
from lagom_overlap.toml_tables import from_table, parse_toml, toml_value
from lagom_overlap.units import format_memory, format_percent, format_seconds
from lagom_overlap.verbs.plan import PlanRequest, run_plan
from lagom_overlap.verbs.plan_megatron import by_default, found_switches, with_layout
from lagom_overlap.verbs.plan_problem import read_input
from lagom_overlap.workload.parallel import Dispatcher, ParallelLayout, ParallelTable, PipelineSchedule
from lagom_overlap.workload.parallel.layout_check import check_model
from lagom_overlap.workload.step import load_rules
from measured_rows import BadRowError, NotModelledError, read
from training_steps.case import COLUMNS, StepCase
from training_steps.jobs import case_of

FRAMEWORKS: Final = ("Megatron-Bridge", "NeMo/Megatron")
TITAN: Final = "torchtitan"
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
ABOUT_FSDP2: Final = """
## torchtitan's recipes and FSDP2's settings

The same of torchtitan's published steps: `lagom plan` of the recipe as a job file, with FSDP2's settings as
torchtitan leaves them (parameters gathered again in backward, no prefetch lists, one buffer). What is advised takes
that share off the iteration, all other settings as advised, as `lagom simulate --set` predicts it; no row measures it.

"""
HEAD_FSDP2: Final = ("recipe", "measured", "recipe, predicted", "advised", "peak memory", "what is advised")


def page(lines: Sequence[str], num_equal: int, titan: Sequence[str]) -> str:
    """The tables with what they are about."""
    text = ABOUT.format(num_equal=num_equal, num=len(lines)) + _table(HEAD, lines)
    return text + (ABOUT_FSDP2 + _table(HEAD_FSDP2, titan) if titan else "")


def _table(head: Sequence[str], lines: Sequence[str]) -> str:
    return "\n".join((f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines)) + "\n"


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
        says_batch=True,
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
    check_switches(recipe, told)
    times = [case.measured_s, *(job.times.iteration_s for job in (recipe, start, advised))]
    cut = " (search ended by the clock)" if found.was_cut else ""
    return (
        f"{case.what} {case.precision.products}",
        *map(format_seconds, times),
        "; ".join(differences(told)) + cut or EQUAL,
    )


def typed(job: JobStep, keys: Mapping[str, object]) -> JobStep:
    """The job with keys of `[parallel]` as a file has them."""
    tables = parse_toml("\n".join(f"{key} = {toml_value(value)}" for key, value in keys.items()).encode())
    table = from_table(tables, ParallelTable, "advice")
    return replace(job, layout=replace(job.layout, **{key: getattr(table, key) for key in keys}))


def check_switches(recipe: JobStep, found: Found) -> None:
    """Every figure of a switch is that of the job with its keys typed."""
    for one in found.switches:
        for keys, said_s in ((one.without_keys, one.without_s), (one.with_keys, one.with_s)):
            other = typed(recipe, keys)
            check_model(other.model, other.layout, other.seq_len)
            if said_s is not None and other.times.iteration_s != said_s:
                sys.exit(f"{one.switch}: {dict(keys)} takes {other.times.iteration_s} s, {said_s} s were said")


def tables_of(case: StepCase) -> dict[str, dict[str, Any]]:
    """A published job of torchtitan as a job file."""
    default, precision = ParallelLayout(), case.precision
    parallel: dict[str, Any] = {"framework": case.framework}
    for key in (field.name for field in fields(ParallelLayout)):
        value = getattr(case.layout, key)
        if value != getattr(default, key) or key in ("data", "global_batch", "zero_stage", "overlap_gradients"):
            parallel[key] = [*map(str, value)] if isinstance(value, tuple) else value
    cluster = {"nodes": case.cluster.num_nodes, "gpus_per_node": case.cluster.gpus_per_node}
    formats = {key: getattr(precision, key) for key in ("parameter", "gradient", "reduction", "products")}
    return {
        "job": {"name": "recipe"},
        "model": {"name": case.model.name, "seq_len": case.seq_len},
        "cluster": {"preset": case.cluster.name, **cluster},
        "precision": formats,
        "parallel": parallel,
    }


def fsdp2_row_of(case: StepCase, seconds: float) -> tuple[str, ...]:
    """The line of a recipe of torchtitan."""
    tables = tables_of(case)
    job = JobVariants.of(tables, case.what, Path())
    recipe = Job(job.one()).step
    assert recipe is not None
    assert (recipe.layout, recipe.precision, recipe.cluster) == (case.layout, case.precision, case.cluster), case.what
    given = read_input(job.one())
    result = run_plan(replace(given, problem=replace(given.problem, budget_s=seconds)), PlanRequest())
    assert result.fsdp2 is not None
    advice = [one.key for one in result.fsdp2.switches]
    sets = [one for keys in advice for one in keys.split(" --set ")]
    advised = Job(JobVariants.of(tables, case.what, Path(), sets).one()).step
    assert advised is not None
    check_memory(advised)
    said_s, own_s = result.iteration_s.after, advised.times.iteration_s
    if abs(said_s - own_s) > 1e-9 * own_s:
        sys.exit(f"{case.what}: {sets} take {own_s} s, {said_s} s were said")
    lines = [f"`--set {one.key}`: {format_percent(one.gain, signed=True)}" for one in result.fsdp2.switches]
    return (
        f"{case.what} {case.precision.products} {case.framework}",
        *map(format_seconds, (case.measured_s, recipe.times.iteration_s, own_s)),
        f"{format_memory(recipe.most_bytes)} -> {format_memory(advised.most_bytes)}",
        "; ".join(lines) or EQUAL,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 2 where the file is none."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="the table of published training steps")
    parser.add_argument("--into", type=Path, help="a file for the table")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each recipe's search")
    parser.add_argument("--only", metavar="FRAMEWORK", help="megatron or torchtitan: the recipes of one framework")
    asked = parser.parse_args(arguments)
    cases = []
    for row in read(asked.table, COLUMNS)[1]:
        if row.text("framework").startswith((*FRAMEWORKS, TITAN)):
            try:
                cases.append(case_of(row))
            except (LagomError, BadRowError, NotModelledError):
                continue
    lines: list[str] = []
    titan: list[str] = []
    num_equal = 0
    for case in distinct(cases):
        is_titan = case.framework.startswith(TITAN)
        if asked.only and not case.framework.startswith(asked.only):
            continue
        try:
            cells = (fsdp2_row_of if is_titan else row_of)(case, asked.seconds)
        except LagomError as error:
            cells = (case.what, "", "", "", "", str(error))
        line = f"| {' | '.join(cells)} |"
        num_equal += not is_titan and cells[-1] == EQUAL
        print(line, flush=True)
        (titan if is_titan else lines).append(line)
        if asked.into is not None:
            asked.into.write_text(page(lines, num_equal, titan), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
