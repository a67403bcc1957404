"""Random job files with `[parallel]`, valid and almost valid, against laws that every prediction must obey.

python benchmarks/fuzz_layouts.py run --first 0 --seconds 300      jobs of the next seeds; finds are printed
python benchmarks/fuzz_layouts.py show 17                          the job of a seed as TOML, and what it breaks

Laws: what is refused is refused in one line; what is predicted is finite and not negative; tune and plan name the step
of simulate; a step grows with its layers by as much each time; a slower link, recomputation and more data-parallel
ranks without sharding never shorten it; memory never falls with layers, sequences or tokens; a change that the answers
call a gain gains as much when the job file says it; two runs give the same bytes.
"""

import argparse
import json
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from types import FrameType
from typing import Any, Final

import msgspec

from lagom_overlap.errors import LagomError
from lagom_overlap.hardware import Gpu, load_preset, preset_names
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.jobfile.step import JobStep
from lagom_overlap.jobfile.whole_step import WholeStep
from lagom_overlap.results.simulate import SimulateResult
from lagom_overlap.sim.training import Settings
from lagom_overlap.verbs.plan import PlanRequest, run_plan
from lagom_overlap.verbs.plan_problem import read_input
from lagom_overlap.verbs.simulate import SimulateRequest, run_simulate
from lagom_overlap.workload.models import TransformerModel, load_model, model_names
from lagom_overlap.workload.parallel import Recompute
from lagom_overlap.workload.step.framework_file import has_dispatcher, has_switch
from lagom_overlap.workload.step.rank_groups import SHARDS

LIMIT_S: Final = 60
"""Longer than this and a job counts as hanging."""
ROUNDING: Final = 1e-9
"""Of sums of the same numbers in another order."""
NEARLY: Final = 0.02
"""What a law allows where the model itself has steps: tiles, waves, NCCL's choice by size."""
SPOILT: Final = 0.1
"""Share of jobs with a bad value."""
SMALL: Final = 4e10
"""Parameters of a model that a few dozen GPUs hold."""
Raw = dict[str, Any]
FRAMEWORKS: Final = (
    "megatron", "megatron", "megatron", "fsdp2", "torchtitan", "torchtitan_blocks", "torchtitan_compiled", "fsdp1",
    "ddp", "megatron_deepspeed", "deepspeed",
)  # fmt: skip


def drawn(seed: int) -> Raw:
    """The job of a seed: degrees that mostly divide the model, switches at random, now and then a bad value."""
    rng = random.Random(seed)
    name, framework = rng.choice(model_names()), rng.choice(FRAMEWORKS)
    model = load_model(name)
    parallel: Raw = {"framework": framework}
    pipeline = _degrees(rng, model, parallel)
    parallel |= _pipelined(rng, pipeline, model.num_layers, model.mtp_layers) if pipeline > 1 else {}
    parallel |= _switches(rng, model, parallel)
    table: Raw = {"name": name, "seq_len": rng.choice((128, 1024, 4096, 4096, 8192, 1000))}
    if model.mtp_layers and (framework != "megatron" or parallel.get("zero_stage", 0) > 1 or rng.random() < 0.5):
        table["mtp_layers"] = 0
    preset = rng.choice(preset_names())
    raw: Raw = {
        "job": {"name": f"seed{seed}"},
        "model": table,
        "cluster": {"preset": preset},
        "parallel": parallel,
        "precision": _formats(rng, load_preset(preset).gpu),
        "cost": _cost(rng),
    }
    if rng.random() < SPOILT:
        _spoil(rng, raw)
    return raw


def _degrees(rng: random.Random, model: TransformerModel, parallel: Raw) -> int:
    """Puts degrees and batches into the table; the pipeline's is returned."""

    def power(most: int) -> int:
        return int(2 ** rng.randint(0, max(1, most).bit_length() - 1))

    framework = parallel["framework"]
    is_megatron = framework.startswith("megatron")
    is_small = model.num_params < SMALL
    tensor = power(8) if is_megatron or rng.random() < 0.4 else 1
    pipeline = rng.choice((1, 1, 2, 4, 8) if is_small else (2, 4, 8, 16)) if is_megatron or rng.random() < 0.1 else 1
    context = 1 if model.mamba is not None and rng.random() < 0.95 else rng.choice((1, 1, 1, 2, 4))
    data = power(64) if is_small else rng.choice((16, 64, 128))
    expert = power(min(data * context, model.num_experts)) if model.num_experts and rng.random() < 0.8 else 1
    degrees = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
    parallel |= {key: degree for key, degree in degrees.items() if degree > 1}
    ranks = data
    if framework == "fsdp2" and rng.random() < 0.5 and data > 1:
        parallel["fsdp"] = data
        if expert == 1 and rng.random() < 0.3:
            parallel["replicate"] = rng.choice((2, 4))
            ranks *= parallel["replicate"]
    else:
        parallel["data"] = data
        stages = (0, 1, 1) if is_megatron else (0,) if framework == "ddp" else (2, 3, 3)
        parallel["zero_stage"] = rng.choice(stages if rng.random() < 0.95 else (0, 1, 2, 3))
    micro = rng.choice((1, 1, 1, 2, 4))
    batches = rng.choice((1, 2, 3, 4, 8, 16)) * (pipeline if rng.random() < 0.8 else 1)
    parallel |= {"micro_batch": micro, "global_batch": micro * ranks * batches}
    return int(pipeline)


def _switches(rng: random.Random, model: TransformerModel, parallel: Raw) -> Raw:
    """Keys that are on or off, mostly such as the framework has."""
    framework, tensor, expert = (parallel.get(key, 1) for key in ("framework", "tensor", "expert"))
    keys: Raw = {}
    if tensor > 1 and (model.num_experts or rng.random() < 0.7):
        keys |= {"sequence_parallel": True} | ({"overlap_tensor": True} if rng.random() < 0.4 else {})
    if rng.random() < 0.5:
        keys["recompute"] = rng.choice(["none", "selective", "full", "full", "full", "layers", "products"])
        if keys["recompute"] == "selective" and rng.random() < 0.5:
            modules = ["core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "moe_act"]
            keys["recompute_modules"] = rng.sample(modules, rng.randint(1, 2))
    shares = {
        "async_tensor": 0.2, "overlap_experts": 0.4 * (expert > 1), "fused_experts": 0.2 * (expert > 1),
        "whole_experts": 0.4 * (expert > 1), "cuda_graph": 0.15, "scatter_gather": 0.2, "clip_gradients": 0.1,
    }  # fmt: skip
    keys |= {key: True for key, share in shares.items() if rng.random() < share}
    keys |= {key: False for key in ("flash_attention", "overlap_gradients") if rng.random() < 0.1}
    keys |= {"prefetch": rng.choice((2, 3, 100))} if rng.random() < 0.1 else {}
    keys |= {"bucket_bytes": rng.choice(("1 MB", "1 GB", 1, "25 MiB"))} if rng.random() < 0.1 else {}
    keys |= {"dispatcher": rng.choice(("merged", "capacity"))} if expert > 1 and rng.random() < 0.25 else {}
    return {
        key: value
        for key, value in keys.items()
        if rng.random() < 0.05
        or (has_switch(framework, key) and (key != "dispatcher" or has_dispatcher(framework, value)))
    }


def _formats(rng: random.Random, gpu: Gpu) -> Raw:
    products = ["fp8", "fp8_current"] * (gpu.fp8 or rng.random() < 0.05) + ["mxfp8"] * gpu.mxfp8
    formats = {
        "products": (0.4, products),
        "parameter": (0.1, ["fp16", "fp32"]),
        "gradient": (0.1, ["fp32", "fp16"]),
        "reduction": (0.1, ["bf16", "fp32"]),
    }
    return {key: rng.choice(values) for key, (share, values) in formats.items() if values and rng.random() < share}


def _cost(rng: random.Random) -> Raw:
    keys = {"sm_carveout": (0, 8, 24, 130), "rank_skew_s": (1e-6, 1e-3, 1.0), "profile": ("paper_scale",)}
    return {key: rng.choice(values) for key, values in keys.items() if rng.random() < 0.1}


def _pipelined(rng: random.Random, pipeline: int, num_layers: int, num_mtp: int) -> Raw:
    """Keys of a pipeline: a schedule, and often a layout that has every layer."""
    keys: Raw = {"schedule": rng.choice(("1f1b", "interleaved", "interleaved", "gpipe"))}
    chunks = 1
    if keys["schedule"] == "interleaved":
        chunks = keys["chunks"] = rng.choice((2, 2, 3, 4))
        keys |= {"overlap_p2p": True} if rng.random() < 0.5 else {}
    num = pipeline * chunks
    if rng.random() < 0.2:
        keys["tables_as_layers"] = True
    elif rng.random() < 0.6 or num_layers % num:
        cuts = sorted(rng.sample(range(1, num_layers), num - 1)) if num_layers > num and rng.random() < 0.5 else None
        if cuts is None:
            cuts = [num_layers * place // num for place in range(1, num)]
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True)]
        parts = [f"t*{size}" if size else "" for size in sizes]
        place = -1
        if num > 2 and sizes[-1] == 0 and rng.random() < 0.5:
            place = -2
        parts[place] += "m" * num_mtp
        keys["pipeline_layout"] = "E" + "|".join(parts) + "L"
        if rng.random() < 0.15 and num_mtp:  # predictions in a chunk of their own, the head alone
            keys["pipeline_layout"] = "E" + "|".join(parts[:-1]) + "m" * num_mtp + "|L"
    return keys


def _spoil(rng: random.Random, raw: Raw) -> None:
    """One value that is out of its range or of another kind."""
    table = rng.choice([key for key in ("parallel", "model", "cluster", "cost", "precision") if raw.get(key)])
    key = rng.choice(sorted(raw[table]))
    values: list[Any] = [
        0, -1, 1, 3, 7, 2**47, 2**48, 2**63, 1e308, float("nan"), float("inf"), "", "x", [], {}, True,
        "E|L", "Et*999999|L", "((t))*9|L", "Et*3|(t|m)*2L", "E" + "(t|)*99999" + "L", "\x00", "é\n\x1b[2J", "1e400 MB",
    ]  # fmt: skip
    raw[table][key] = rng.choice(values)


class TooLongError(Exception):
    """A job that took longer than it may."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises in what takes longer."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def simulated(raw: Raw) -> SimulateResult:
    """What simulate says of a job."""
    return run_simulate(SimulateRequest(job=Job(parse_job(raw, "job.toml"))))


def seconds_of(job: JobStep | None, settings: Settings | None = None) -> float | None:
    """A job's iteration; None where it is refused."""
    if job is None:
        return None
    try:
        return job.simulator.times(settings).iteration_s
    except LagomError:
        return None


def sane(result: SimulateResult) -> Iterator[str]:
    """Numbers that are none, or below zero, or parts larger than their whole."""
    for name in ("iteration_s", "tokens_per_s", "model_flops", "mfu", "memory_bytes"):
        value = getattr(result, name)
        if not isfinite(value) or value <= 0:
            yield f"{name} is {value}"
    if result.mfu > 1:
        yield f"mfu is {result.mfu}"
    for stage in result.stages:
        for name in ("step_s", "busy_s", "bubble_s", "compute_s", "launch_s", "gradients_s", "optimizer_s"):
            value = getattr(stage, name)
            if not isfinite(value) or value < -ROUNDING * result.iteration_s:
                yield f"stage {stage.stage}: {name} is {value}"
        for name, comm in stage.communicators.items():
            if min(comm.total_s, comm.exposed_s, comm.stretched_s) < -ROUNDING * result.iteration_s:
                yield f"stage {stage.stage}: {name} is {comm}"
            if comm.exposed_s > comm.total_s * (1 + 1e-6) and name != SHARDS:  # whose copies are waited for, too
                yield f"stage {stage.stage}: {name} shows more than it runs: {comm}"
        if stage.busy_s > result.iteration_s * (1 + ROUNDING):
            yield f"stage {stage.stage} is busy for {stage.busy_s} of {result.iteration_s}"


def same_everywhere(spec: JobSpec, result: SimulateResult) -> Iterator[str]:
    """Another verb's time of the same step."""
    if len(result.stages) > 1:
        return
    whole = WholeStep.of(Job(spec), "simulated")
    if whole is not None and whole.untouched_s != result.iteration_s:
        yield f"tune names {whole.untouched_s}, simulate {result.iteration_s}"


def planned(spec: JobSpec, result: SimulateResult) -> Iterator[str]:
    """What plan says of the same step."""
    assert spec.parallel is not None
    try:
        given = read_input(msgspec.structs.replace(spec, plan=msgspec.structs.replace(spec.plan, budget_s=1.0)))
        plan = run_plan(given, PlanRequest())
    except LagomError as error:
        if "not" not in str(error):
            yield f"plan refuses: {error}"
        return
    batches = result.num_micro_batches
    if len(result.stages) == 1 and batches <= 3 and abs(plan.iteration_s.before / result.iteration_s - 1) > ROUNDING:
        yield f"plan names {plan.iteration_s.before}, simulate {result.iteration_s}"
    if plan.iteration_s.after > plan.iteration_s.before * (1 + ROUNDING):
        yield f"a plan that loses is offered: {plan.iteration_s}"


def grows_with_layers(job: JobStep) -> Iterator[str]:
    """Layers in twos and threes add as much each time; so does memory."""
    model, layout = job.model, job.layout
    is_cut = layout.pipeline_layout or layout.tables_as_layers or model.num_layers % len(model.named_kinds)
    if is_cut or model.num_layers > 64 or layout.prefetch > 3:
        return
    jobs = [replace(job, model=replace(model, num_layers=model.num_layers * n)) for n in (1, 2, 3)]
    times = [seconds_of(each) for each in jobs]
    if None in times:
        return
    first, second, third = (float(t) for t in times if t is not None)
    if abs((third - second) / (second - first) - 1) > NEARLY:
        yield f"layers once, twice, thrice: {first}, {second}, {third}"
    yield from _rising("layers", [each.most_bytes for each in jobs])


def grows_with_tokens(job: JobStep) -> Iterator[str]:
    """More tokens take no less memory and no less time."""
    layout = job.layout
    wider = replace(layout, micro_batch=2 * layout.micro_batch, global_batch=2 * layout.global_batch)
    for what, other in (
        ("sequences", replace(job, layout=wider)),
        ("tokens", replace(job, seq_len=2 * job.seq_len)),
    ):
        yield from _rising(what, [job.most_bytes, other.most_bytes])
        yield from _no_shorter(f"twice the {what}", seconds_of(job), seconds_of(other))
    longer = replace(layout, global_batch=2 * layout.global_batch)
    yield from _no_shorter("twice the micro-batches", seconds_of(job), seconds_of(replace(job, layout=longer)))


def _rising(what: str, values: list[int]) -> Iterator[str]:
    if sorted(values) != values:
        yield f"memory falls with {what}: {values}"


def _no_shorter(what: str, before_s: float | None, after_s: float | None, nearly: float = NEARLY) -> Iterator[str]:
    if before_s is not None and after_s is not None and after_s < before_s * (1 - nearly):
        yield f"{what}: {after_s} s, less than {before_s} s"


def slower_links(job: JobStep) -> Iterator[str]:
    """A link at half its rate, or a tenth, with each collective run as NCCL runs it on the faster one.

    NCCL chooses anew on a slower link, and may choose better: its table adds the latency of one loop of chunks to
    bytes over bandwidth, where the price here (`cost.communication`) has that of every loop. Seed 129: all-reduces of
    26 MB over 64 nodes take LL at 48 GB/s (3.2 ms by the table, 8.5 ms by the price) and LL128 at 24 GB/s (3.7, 4.5).
    """
    cluster, held = job.cluster, job.simulator.price.model.default_config
    before_s = seconds_of(job, held)
    for wire in ("intra", "inter"):
        link = getattr(cluster, wire)
        if wire == "inter" and cluster.num_nodes == 1:
            continue
        for factor in (0.5, 0.1):
            other = replace(cluster, **{wire: replace(link, bytes_per_s=link.bytes_per_s * factor)})
            yield from _no_shorter(f"{wire} at {factor}", before_s, seconds_of(replace(job, cluster=other), held))


def recomputes(job: JobStep) -> Iterator[str]:
    """Recomputation takes time and gives memory."""
    none = replace(job, layout=replace(job.layout, recompute=Recompute.NONE, recompute_modules=()))
    full = replace(job, layout=replace(job.layout, recompute=Recompute.FULL, recompute_modules=()))
    none_s = seconds_of(none)
    for what, other in (("full", full), (f"{job.layout.recompute}", job)):
        yield from _no_shorter(f"recompute {what}", none_s, seconds_of(other), 1e-3)
        if other.most_bytes > none.most_bytes:
            yield f"recompute {what} needs {other.most_bytes} bytes, none {none.most_bytes}"


def more_ranks(job: JobStep) -> Iterator[str]:
    """Twice the data-parallel ranks with as much work each, nothing shared out."""
    layout = job.layout
    if layout.zero_stage:
        return
    other = replace(layout, data=2 * layout.data, global_batch=2 * layout.global_batch)
    cluster = replace(job.cluster, num_nodes=max(1, other.num_gpus // job.cluster.gpus_per_node))
    if cluster.num_gpus == other.num_gpus:
        yield from _no_shorter(
            "twice the ranks", seconds_of(job), seconds_of(replace(job, layout=other, cluster=cluster))
        )


def answers_hold(raw: Raw, result: SimulateResult) -> Iterator[str]:
    """What is predicted of a switch is what the job file with the switch is predicted to take."""
    for answer in result.what_ifs:
        table, _, line = answer.setting.partition("] ")
        if not answer.setting.startswith("["):
            continue
        key, _, value = line.partition(" = ")
        other = json.loads(json.dumps(raw))
        other.setdefault(table[1:], {})[key] = json.loads(value)
        try:
            after_s = simulated(other).iteration_s
        except LagomError as error:
            yield f"{answer.setting} is answered ({answer.verdict}) but refused: {error}"
            continue
        if abs(result.iteration_s - answer.gain_s - after_s) > ROUNDING * result.iteration_s:
            yield f"{answer.setting}: answered {result.iteration_s - answer.gain_s}, simulated {after_s}"


LAWS: Final[tuple[Callable[[JobStep], Iterator[str]], ...]] = (
    grows_with_layers, grows_with_tokens, slower_links, recomputes, more_ranks,
)  # fmt: skip


def finds_of(raw: Raw, *, plans: bool) -> tuple[str, list[str]]:
    """How a job ended, and what it breaks."""
    try:
        with limited(LIMIT_S):
            spec = parse_job(raw, "job.toml")
            result = run_simulate(SimulateRequest(job=Job(spec)))
    except LagomError as error:
        text = str(error)
        return "refused", [f"more than a line: {text!r}"] if "\n" in text or len(text) > 1200 else []
    except TooLongError:
        return "hangs", [f"no answer within {LIMIT_S} s"]
    except Exception:  # what is looked for
        return "raised", [traceback.format_exc()]
    finds: list[str] = []
    job = Job(spec).step
    assert job is not None
    checks: list[tuple[str, Iterator[str]]] = [("sane", sane(result)), ("tune", same_everywhere(spec, result))]
    checks += [(law.__name__, law(job)) for law in LAWS]
    checks += [("answers", answers_hold(raw, result))]
    checks += [("plan", planned(spec, result))] if plans else []
    for name, check in checks:
        try:
            with limited(4 * LIMIT_S):
                finds += [f"{name}: {find}" for find in check]
        except TooLongError:
            finds.append(f"{name}: no answer within {4 * LIMIT_S} s")
        except Exception:  # what is looked for
            finds.append(f"{name}: {traceback.format_exc()}")
    if simulated(raw).to_json() != result.to_json():
        finds.append("two runs differ")
    return "predicted", finds


def toml_of(raw: Raw) -> str:
    """The job as a file says it."""
    lines = []
    for table, keys in raw.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Jobs until the time is over."""
    ended: Counter[str] = Counter()
    give_up, seed, num_finds = time.monotonic() + arguments.seconds, arguments.first, 0
    while time.monotonic() < give_up:
        began = time.monotonic()
        how, finds = finds_of(drawn(seed), plans=seed % 5 == 0)
        ended[how] += 1
        for find in finds:
            num_finds += 1
            print(f"seed {seed} {how} ({time.monotonic() - began:.1f} s): {find}", flush=True)
        seed += 1
    print(f"seeds {arguments.first} to {seed - 1}: {dict(ended)}, {num_finds} finds")
    return int(num_finds > 0)


def show(arguments: argparse.Namespace) -> int:
    """One job."""
    raw = drawn(arguments.seed)
    print(toml_of(raw))
    try:
        print(simulated(raw).iteration_s)
    except LagomError as error:
        print(error)
    print(*finds_of(raw, plans=True)[1], sep="\n")
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    running = verbs.add_parser("run")
    running.add_argument("--first", type=int, default=0)
    running.add_argument("--seconds", type=float, default=60.0)
    running.set_defaults(verb=run)
    showing = verbs.add_parser("show")
    showing.add_argument("seed", type=int)
    showing.set_defaults(verb=show)
    arguments = parser.parse_args()
    return int(arguments.verb(arguments))


if __name__ == "__main__":
    sys.exit(main())
