"""`lagom init SOURCE`: a commented job file, from a model's name, a `config.json`, a model file, a script or a trace.

Of a model it is written here; `init_from_script.py` and `init_from_trace.py` write the others.
"""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import tomli_w

from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.hardware import Cluster
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.jobfile.step import SEQ_LEN, JobStep, cluster_of, job_step
from lagom_overlap.trace.reader import is_trace
from lagom_overlap.verbs.init_check import checked
from lagom_overlap.verbs.init_config import read_model, safe_name
from lagom_overlap.verbs.init_file import (
    InitRequest,
    InitResult,
    check_new,
    node_lines,
    seen_from_job,
    toml_line,
    words_of,
    written,
)
from lagom_overlap.verbs.init_from_script import job_of_script
from lagom_overlap.verbs.init_from_trace import job_of_trace
from lagom_overlap.verbs.init_script import read_script
from lagom_overlap.verbs.simulate_layouts import LayoutsRequest, fastest_layout, least_gpus
from lagom_overlap.workload.models import TransformerModel


def run_init(request: InitRequest) -> InitResult:
    """Writes the job file, and a model file next to it where a `config.json` was read; a check writes neither.

    Raises:
        LagomError: if the source is none of the above, the GPUs fill no nodes, or a file is there already.
    """
    if not request.source:
        raise JobError("SOURCE is empty, must be a model's name, a config.json, a model file, SCRIPT.py, or a trace")
    source = Path(request.source)
    if source.suffix == ".py":
        return job_of_script(request, read_script(source))
    if source.is_dir() or (source.is_file() and source.suffix != ".toml" and is_trace(source)):
        return job_of_trace(request)
    if request.cluster is None or request.num_gpus is None:
        _known_source(request.source)  # a model that is not there is to be said first
        raise JobError(f"a job of a model needs --cluster NAME and --gpus N: lagom init {request.source} --cluster ...")
    seq_len = request.seq_len or SEQ_LEN
    return _of_model(request, _Whole(request.source, request.cluster, request.num_gpus, seq_len, request.out))


class _Whole(NamedTuple):
    """A request of which everything is known."""

    source: str
    cluster: str
    num_gpus: int
    seq_len: int
    out: Path


def _of_model(request: InitRequest, whole: _Whole) -> InitResult:
    model, model_text = _known_source(request.source)
    cluster = cluster_of(whole.cluster, whole.num_gpus)
    model_path = request.out.parent / f"{model.name}.model.toml"
    name = str(model_path) if model_text else request.source
    if not request.only_checks:
        check_new(request.out)  # before a search that takes some seconds
    with TemporaryDirectory() as folder:
        own = Path(folder) / "model.toml"
        own.write_bytes(model_text)
        chosen = _first_that_fits(whole, str(own) if model_text else name)
    verdict = checked(chosen.step, chosen.parallel)
    files = {model_path: model_text} if model_text else {}
    job = _job_text(whole, name, model, cluster, chosen.parallel).encode()
    notes = (*chosen.notes, *verdict.notes)
    following = _next_lines(whole, is_ranked=bool(chosen.notes))
    result = written(request, files | {request.out: job}, notes, following, verdict.refused)
    if chosen.more_gpus is None:
        return result
    out = request.out if request.only_checks else request.out.with_stem(f"{request.out.stem}-{chosen.more_gpus}")
    again = shlex.join(words_of(replace(request, num_gpus=chosen.more_gpus, out=out)))
    return replace(result, next=(f"Next: lagom init {again}    # that many are enough",))


def _known_source(source: str) -> tuple[TransformerModel, bytes]:
    """As `read_model`, of a file that is none of what a job is written of, too.

    Raises:
        LagomError: if there is no such model, or the file describes none.
    """
    if not source.endswith((".json", ".toml")) and Path(source).exists():
        raise JobError(f"{source!r} is neither a trace, a config.json, a model file (*.toml) nor a script (*.py)")
    return read_model(source)


class _Chosen(NamedTuple):
    """A layout to begin with, and why it is no plain one."""

    parallel: Mapping[str, Any]
    step: JobStep
    notes: tuple[str, ...] = ()
    more_gpus: int | None = None
    """Where no layout fits: on how many GPUs one does."""


def _first_that_fits(request: _Whole, model: str) -> _Chosen:
    """FSDP over all GPUs (one GPU: without it); with every layer recomputed; else the fastest layout of a ranking.

    A start, not advice: which layout is the fastest is `lagom simulate --model`'s question. Where nothing fits, it is
    FSDP with recomputation, of which the verdict says what it lacks.
    """
    plain: dict[str, Any] = {"fsdp": request.num_gpus} if request.num_gpus > 1 else {"framework": "ddp"}
    plain["micro_batch"] = 1
    recomputed = {**plain, "recompute": "full"}
    for parallel in (plain, recomputed):
        step = _step_of(request, model, parallel)
        obstacle = _obstacle(step)
        if not obstacle:
            return _Chosen(parallel, step)
    asked = LayoutsRequest(model=model, cluster=request.cluster, num_gpus=request.num_gpus, seq_len=request.seq_len)
    found = fastest_layout(asked)
    if found is None:
        return _Chosen(recomputed, step, more_gpus=least_gpus(asked))
    note = f"FSDP over all GPUs {obstacle}, so this is the fastest layout that lagom simulate finds."
    return _Chosen(found, _step_of(request, model, found), (note,))


def _obstacle(step: JobStep) -> str:
    """Why the job cannot run; "" if it can."""
    if not step.fits:
        return "does not fit"
    try:
        step.times  # noqa: B018 - what a framework cannot run of a model is refused here
    except LagomError:
        return "cannot run this model"
    return ""


def _step_of(request: _Whole, model: str, parallel: Mapping[str, Any]) -> JobStep:
    tables = {
        "job": {"name": "init"},
        "model": {"name": model, "seq_len": request.seq_len},
        "cluster": {"preset": request.cluster},
        "parallel": parallel,
    }
    step = job_step(parse_job(tables, "lagom init"))
    assert step is not None, model
    return step


def _is_plain(parallel: Mapping[str, Any]) -> bool:
    """Whether it is FSDP over all GPUs, or one GPU: what a search found names its batch."""
    return "global_batch" not in parallel


def _job_text(
    request: _Whole, name: str, model: TransformerModel, cluster: Cluster, parallel: Mapping[str, Any]
) -> str:
    quoted = {key: tomli_w.dumps({key: value}).strip() for key, value in parallel.items()}
    said = {
        "fsdp": "fully sharded data parallelism over this many GPUs; or data, tensor, pipeline, context, expert",
        "framework": "fsdp2, ddp, torchtitan, megatron, ... (lagom list frameworks)",
        "micro_batch": "sequences per GPU and forward",
        "global_batch": "sequences per step, on all GPUs",
    }
    if _is_plain(parallel):
        said["recompute"] = "none, selective, full, which takes the least memory"
    file, gpus = safe_name(request.out.name), f"{request.num_gpus} GPUs of {safe_name(cluster.name)}"
    lines = [
        f"# Written by lagom init: {safe_name(model.name)} on {gpus}. All keys: lagom docs formats",
        "#",
        f"#   lagom simulate {file}    # what a step takes, what it holds, whether a change would pay",
        f"#   lagom plan {file}        # settings of the framework",
        f"#   lagom tune {file}        # settings of each collective",
        "",
        "[job]",
        tomli_w.dumps({"name": f"{model.name}-{request.num_gpus}"}).strip(),
        "",
        "[model]",
        toml_line(name=seen_from_job("model", "name", name, request.out)) + "    # lagom list models; or a model file",
        f"seq_len = {request.seq_len}",
        "",
        "[cluster]",
        toml_line(preset=seen_from_job("cluster", "preset", request.cluster, request.out))
        + "    # lagom list clusters; or a file of your own",
        *node_lines(cluster),
        "",
        "[parallel]",
        *(f"{text}    # {said[key]}" if key in said else text for key, text in quoted.items()),
    ]
    return "\n".join(lines) + "\n"


def _next_lines(request: _Whole, *, is_ranked: bool) -> tuple[str, ...]:
    """What to type next; where the layout is the first of a ranking, nothing ranks it again."""
    model = request.source
    lines = [f"Next: lagom simulate {shlex.quote(str(request.out))}"]
    if not model.endswith(".json") and not is_ranked:
        named = f"--model {shlex.quote(model)} --cluster {shlex.quote(request.cluster)}"
        ranks = f"{named} --gpus {request.num_gpus} --seq-len {request.seq_len}"
        lines.append(f"Which layout is the fastest: lagom simulate {ranks}")
    return tuple(lines)
