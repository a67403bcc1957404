"""`lagom init SOURCE`: a commented job file, from a model's name, a `config.json`, a model file, a script or a trace.

A training script is read as text (`init_script.py`); what it does not say, the job file leaves to be filled in. Of a
profiler's trace, ranks, groups and collectives are told, and the job is one for `lagom tune --from-trace`.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, TypeVar

import tomli_w

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.analysis.trace_gpu import cluster_of_trace
from lagom_overlap.errors import JobError, LagomError, OutputError
from lagom_overlap.hardware import Cluster
from lagom_overlap.jobfile.memory import check_memory
from lagom_overlap.jobfile.reading import MAX_JOB_BYTES, moved, parse_job
from lagom_overlap.jobfile.spec import ClusterTable
from lagom_overlap.jobfile.step import SEQ_LEN, JobStep, cluster_of, job_step, stated_cluster
from lagom_overlap.planners.fsdp2 import USABLE_MEMORY
from lagom_overlap.record import read_regular, write_private
from lagom_overlap.trace.files import distinct_files
from lagom_overlap.trace.reader import is_trace, read_traces
from lagom_overlap.units import NS, format_bytes, format_memory, format_seconds
from lagom_overlap.verbs.init_config import model_file, read_model, safe_name, unwritten
from lagom_overlap.verbs.init_script import ScriptFacts, Told, read_script
from lagom_overlap.verbs.simulate_layouts import LayoutsRequest, fastest_layout, least_gpus
from lagom_overlap.workload.models import TransformerModel, model_names

FILL_IN: Final = "fill in"
_MOST: Final = 12
"""Groups, and kinds of calls, that are listed of a trace."""
MAX_GPUS: Final = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class InitRequest:
    """What to write a job of: a model's name, a `*.toml` of one, a `config.json`, a `*.py`, or a trace.

    A model needs the cluster, and how many of its GPUs; a script or a trace may say so, or leave it open.
    """

    source: str
    cluster: str | None = None
    num_gpus: int | None = None
    seq_len: int | None = None
    out: Path = Path("job.toml")
    only_checks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InitResult:
    """The files that were written, the job file first (none by a check), and what is to be known of it."""

    files: tuple[Path, ...]
    notes: tuple[str, ...]
    next: tuple[str, ...] = ()
    refused: str = ""
    """Why a check was not passed."""


def run_init(request: InitRequest) -> InitResult:
    """Writes the job file, and a model file next to it where a `config.json` was read; a check writes neither.

    Raises:
        LagomError: if the source is none of the above, the GPUs fill no nodes, or a file is there already.
    """
    if not request.source:
        raise JobError("SOURCE is empty, must be a model's name, a config.json, a model file, SCRIPT.py, or a trace")
    source = Path(request.source)
    if source.suffix == ".py":
        return _of_script(request, read_script(source))
    if source.is_dir() or (source.is_file() and source.suffix != ".toml" and is_trace(source)):
        return _of_trace(request)
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


class _Verdict(NamedTuple):
    """What a job leads to, and why it cannot run."""

    notes: tuple[str, ...]
    refused: str = ""


def _of_model(request: InitRequest, whole: _Whole) -> InitResult:
    model, model_text = _known_source(request.source)
    cluster = cluster_of(whole.cluster, whole.num_gpus)
    model_path = request.out.parent / f"{model.name}.model.toml"
    name = str(model_path) if model_text else request.source
    if not request.only_checks:
        _check_new(request.out)  # before a search that takes some seconds
    with TemporaryDirectory() as folder:
        own = Path(folder) / "model.toml"
        own.write_bytes(model_text)
        chosen = _first_that_fits(whole, str(own) if model_text else name)
    verdict = _verdict(chosen.step, chosen.parallel)
    files = {model_path: model_text} if model_text else {}
    job = _job_text(whole, name, model, cluster, chosen.parallel).encode()
    notes = (*chosen.notes, *verdict.notes)
    following = _next_lines(whole, is_ranked=bool(chosen.notes))
    result = _written(request, files | {request.out: job}, notes, following, verdict.refused)
    if chosen.more_gpus is None:
        return result
    out = request.out if request.only_checks else request.out.with_stem(f"{request.out.stem}-{chosen.more_gpus}")
    again = shlex.join(_words(replace(request, num_gpus=chosen.more_gpus, out=out)))
    return replace(result, next=(f"Next: lagom init {again}    # that many are enough",))


def _known_source(source: str) -> tuple[TransformerModel, bytes]:
    """As `read_model`, of a file that is none of what a job is written of, too.

    Raises:
        LagomError: if there is no such model, or the file describes none.
    """
    if not source.endswith((".json", ".toml")) and Path(source).exists():
        raise JobError(f"{source!r} is neither a trace, a config.json, a model file (*.toml) nor a script (*.py)")
    return read_model(source)


def _check_new(path: Path) -> None:
    if not path.name:
        raise OutputError(f"--out {str(path)!r}: must be a file's name, such as job.toml")
    if os.path.lexists(path):  # a link that leads nowhere is somebody's, too
        raise OutputError(f"{str(path)!r} is there already, must not exist: give another --out")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"folder {str(path.absolute().parent)!r} does not exist")


def _written(
    request: InitRequest, files: Mapping[Path, bytes], notes: Sequence[str], following: Sequence[str], refused: str = ""
) -> InitResult:
    """The files, of which the job file is the last; none where only what they lead to is asked for."""
    if request.only_checks:
        again = shlex.join(_words(request))
        return InitResult(
            files=(), notes=tuple(notes), next=(f"Next: lagom init {again}    # writes it",), refused=refused
        )
    new = {path: content for path, content in files.items() if path == request.out or not _holds(path, content)}
    for path in new:
        _check_new(path)
    for path, content in new.items():  # the job file last: it names the other
        write_private(path, content)
    told = (f"As it stands, {refused}",) if refused else ()
    return InitResult(files=tuple(reversed(new)), notes=(*notes, *told), next=tuple(following))


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and read_regular(path, MAX_JOB_BYTES) == content


def _words(request: InitRequest) -> Iterator[str]:
    """The command line of a request, without `--check`."""
    yield request.source
    named = {"cluster": request.cluster, "gpus": request.num_gpus, "seq-len": request.seq_len, "out": request.out}
    default = InitRequest(source="").out
    for flag, value in named.items():
        if value is not None and value != default:
            yield from (f"--{flag}", str(value))


def _of_script(request: InitRequest, facts: ScriptFacts) -> InitResult:
    """What the script says, each key with the line that says it; the rest as comments to fill in."""
    source = Path(request.source)
    stem = safe_name(source.stem) or "job"
    num_gpus = _gpus(request, facts)
    model_path = request.out.parent / f"{stem}.model.toml"
    model, model_text = _script_model(facts, source, stem)
    seen = model.value if not model_text else _seen_model(model_path, request.out)
    lines = [
        f"# Written by lagom init from {safe_name(source.name)}, which was not run. All keys: lagom docs formats.",
        f"# Lines with {FILL_IN!r} are what it does not say.",
        "",
        "[job]",
        _toml(name=stem),
        "",
        "[model]",
        _known("name", seen or None, model.where, "llama-3-8b"),
        _told("seq_len", request.seq_len, facts.sizes.get("seq_len"), "tokens per sequence", SEQ_LEN),
        "",
        "[cluster]",
        _known("preset", _seen(request.cluster, request.out), "lagom list clusters; or a file of your own", "h100_dgx"),
        *_nodes(request.cluster, num_gpus),
        "",
        "[parallel]",
        *_script_parallel(facts, num_gpus),
    ]
    text = "\n".join(lines) + "\n"
    open_keys = _open_keys(lines)
    says = [*_said(facts), *([f"the shapes of its model ({model.where})"] if model_text else [])]
    notes = [f"The script says: {what}" for what in says] or ["The script says nothing of its sizes."]
    notes += [f"Not told: {what}" for what in facts.unread]
    refused = ""
    if open_keys:
        keys = f"{', '.join(open_keys)} {'is' if len(open_keys) == 1 else 'are'} not told"
        refused = f"this cannot be checked, because {keys}" if request.only_checks else ""
        notes += [] if request.only_checks else [f"To fill in: {', '.join(open_keys)}."]
    else:
        verdict = _leads_to(text, request, model_text)
        notes += verdict.notes
        refused = verdict.refused
    files = {model_path: model_text} if model_text else {}
    out = shlex.quote(str(request.out))
    following = [f"Next: lagom simulate {out}{'    # once it is filled in' if open_keys else ''}"]
    command = f"lagom run --observe -- {_launcher(facts, request.cluster, num_gpus)} {shlex.quote(request.source)}"
    following.append(f"What it does when it runs: {command}")
    return _written(request, files | {request.out: text.encode()}, notes, following, refused)


def _gpus(request: InitRequest, facts: ScriptFacts) -> int | None:
    """GPUs that are asked for, or that the script's mesh has.

    Raises:
        JobError: if they contradict each other.
    """
    mesh = facts.num_ranks
    if mesh is None or request.num_gpus is None:
        return request.num_gpus or (mesh if facts.is_whole_mesh else None)
    if request.num_gpus == mesh or (not facts.is_whole_mesh and request.num_gpus % mesh == 0):
        return request.num_gpus
    degrees = " x ".join(f"{key} {told.value}" for key, told in facts.degrees.items() if key != "expert")
    where = next(iter(facts.degrees.values())).where.partition(":")[0]
    must = f"must be {mesh}" if facts.is_whole_mesh else f"must be a multiple of {mesh}"
    raise JobError(f"--gpus {request.num_gpus}: {must}, the GPUs of the script's device mesh ({where}: {degrees})")


def _script_model(facts: ScriptFacts, source: Path, stem: str) -> tuple[Told, bytes]:
    """The model's name, "" if it is not told, and why; and the model file where the script writes its shapes out."""
    for config, where in facts.configs:
        if missing := unwritten(config):
            facts.unread.append(f"{where}, which leaves {', '.join(missing)} to its defaults")
            continue
        try:
            model, text = model_file({**config, "_name_or_path": stem}, f"{source}, {where}", source.name)
        except LagomError as error:
            facts.unread.append(str(error))
            continue
        return Told(model.name, where), text
    for told in facts.models:
        if (found := _known_model(str(told.value))) is not None:
            return Told(found, told.where), b""
    return Told("", _unknown_model(facts)), b""


def _script_parallel(facts: ScriptFacts, num_gpus: int | None) -> Iterator[str]:
    """The lines of `[parallel]`."""
    framework = None if facts.framework is None else str(facts.framework.value)
    why = "lagom list frameworks" if facts.framework is None else facts.framework.where
    yield _known("framework", framework, why, "fsdp2")
    yield from (f"{key} = {told.value}    # {_safe_words(told.where)}" for key, told in facts.degrees.items())
    shared = facts.num_ranks if facts.is_whole_mesh else None
    if not facts.degrees and framework is not None:
        is_fsdp = framework.startswith("fsdp")
        key, what = ("fsdp", "GPUs that share the parameters") if is_fsdp else ("data", "data-parallel GPUs")
        shared = num_gpus if is_fsdp or framework == "ddp" else None
        yield _known(key, None if shared == 1 else shared, what, "8")
    yield _told("micro_batch", None, facts.sizes.get("micro_batch"), "sequences per GPU and forward", 1)
    accumulated, each = facts.sizes.get("num_micro_batches"), facts.sizes.get("micro_batch")
    if accumulated is None:
        return
    said = f"{accumulated.value} micro-batches are accumulated ({_safe_words(accumulated.where)})"
    if shared is None or each is None:
        yield f"# global_batch = ...    # {FILL_IN}: {said}, times sequences, times data-parallel GPUs"
        return
    split = prod(int(told.value) for key, told in facts.degrees.items() if key in ("tensor", "context", "pipeline"))
    copies = shared // split
    batch = int(accumulated.value) * int(each.value) * copies
    yield f"global_batch = {batch}    # {said} of {each.value}, on {copies} GPUs"


def _open_keys(lines: Sequence[str]) -> list[str]:
    """Keys that are left to fill in, with their table."""
    found, table = list[str](), ""
    for line in lines:
        if line.startswith("["):
            table = line.strip("[]")
        elif FILL_IN in line and "=" in line:
            found.append(f"{table}.{line.split('=')[0].lstrip('# ').strip()}")
    return found


def _launcher(facts: ScriptFacts, cluster: str | None, num_gpus: int | None) -> str:
    """What starts the script: python, or torchrun with a process for each GPU."""
    if not facts.has_ranks:
        return "python"
    if num_gpus is None or cluster is None:
        return f"torchrun --nproc-per-node {num_gpus or 'gpu'}"
    machine = cluster_of(cluster, num_gpus)
    meets = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    nodes = f"--nnodes {machine.num_nodes} {meets} " if machine.num_nodes > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {machine.gpus_per_node}"


def _leads_to(text: str, request: InitRequest, model_text: bytes) -> _Verdict:
    """What a job file that is about to be written leads to."""
    tables = tomllib.loads(text)
    tables["cluster"]["preset"] = request.cluster
    with TemporaryDirectory() as folder:
        own = Path(folder) / "model.toml"
        own.write_bytes(model_text)
        if model_text:
            tables["model"]["name"] = str(own)
        try:
            step = job_step(parse_job(tables, str(request.out)))
        except LagomError as error:
            return _Verdict((), f"it cannot run as it stands: {error}")
    assert step is not None, text
    return _verdict(step, tables["parallel"])


def _said(facts: ScriptFacts) -> Iterator[str]:
    if facts.framework is not None:
        yield f"{facts.framework.value} ({facts.framework.where})"
    if facts.backend is not None:
        yield f"backend {facts.backend.value} ({facts.backend.where})"
    for named in (facts.degrees, facts.sizes):
        yield from (f"{key.replace('_', ' ')} {told.value} ({told.where})" for key, told in named.items())
    yield from (f"model {told.value} ({told.where})" for told in facts.models)


def _known_model(said: str) -> str | None:
    """The model of ours with a published model's name: its last part without what tells its tunings apart."""
    last = said.rstrip("/").rpartition("/")[2].lower()
    bare = re.sub(r"^meta-|(-hf|-instruct|-base|-chat|-it|-v[0-9.]+)+$", "", last)
    return next((name for name in model_names() if name in (last, bare)), None)


def _unknown_model(facts: ScriptFacts) -> str:
    if not facts.models:
        return "lagom list models, or a model file; or lagom capture SCRIPT.py:FUNCTION"
    return f"{_safe_words(str(facts.models[0].value))} is not known here: a model file, or lagom init config.json"


def _nodes(cluster: str | None, num_gpus: int | None) -> Sequence[str]:
    if cluster is None or num_gpus is None:
        return (f"# nodes = 1    # {FILL_IN}",)
    return _node_lines(cluster_of(cluster, num_gpus))


def _node_lines(cluster: Cluster) -> Sequence[str]:
    each = (f"gpus_per_node = {cluster.gpus_per_node}",) if cluster.num_nodes == 1 else ()
    return (f"nodes = {cluster.num_nodes}", *each)


def _seen_model(path: Path, out: Path) -> str:
    """A model file as the job file names it."""
    name: str = moved({"model": {"name": str(path)}}, Path(), out.parent)["model"]["name"]
    return name


def _seen(preset: str | None, out: Path) -> str | None:
    """A preset's name, or the file of a cluster as the job file names it."""
    name: str | None = moved({"cluster": {"preset": preset}}, Path(), out.parent)["cluster"]["preset"]
    return name


def _known(key: str, value: str | int | None, why: str, example: str) -> str:
    """A key with its value; commented, with an example, where there is none."""
    if value is not None:
        return f"{_toml(**{key: value})}    # {_safe_words(why)}"
    shown = example if example.isdecimal() else f'"{example}"'
    return f"# {key} = {shown}    # {FILL_IN}: {_safe_words(why)}"


def _told(key: str, given: int | None, told: Told | None, what: str, default: int) -> str:
    if given is not None:
        return f"{key} = {given}    # {what}, as given"
    if told is not None:
        return f"{key} = {told.value}    # {what}; {_safe_words(told.where)}"
    return f"# {key} = {default}    # {FILL_IN}: {what}"


def _toml(**table: str | int) -> str:
    return tomli_w.dumps(table).strip()


def _safe_words(text: str) -> str:
    """Text of a file for a comment: on one line, without what is no word."""
    return "".join(char if char.isprintable() else "?" for char in text)[:200]


def _of_trace(request: InitRequest) -> InitResult:
    """A job for `lagom tune --from-trace`, with what the trace shows as comments."""
    findings = analyse(read_traces(distinct_files((Path(request.source),))[0]))
    seen = next((found for rank in findings.ranks if (found := cluster_of_trace(rank.trace)) is not None), None)
    gpu = next((rank.trace.gpu_name for rank in findings.ranks if rank.trace.gpu_name), "a GPU that it does not name")
    most = max((row.key.num_ranks for row in findings.rows), default=1)
    preset = request.cluster or (None if seen is None else seen.name)
    if preset is None:
        raise JobError(f"no preset has the trace's GPU ({gpu}): give --cluster NAME (lagom list clusters)")
    cluster = stated_cluster(ClusterTable(preset=preset))
    groups: dict[str, int] = {}
    for row in findings.rows:
        groups[row.key.communicator] = max(groups.get(row.key.communicator, 0), row.key.num_ranks)
    largest = sorted(findings.rows, key=lambda row: -row.total_ns)
    told = [
        f"{len(findings.ranks)} ranks on {gpu}",
        *(f"group {name or '(no name)'}: {number or 'unknown'} ranks" for name, number in list(groups.items())[:_MOST]),
        *(
            f"{row.count} x {row.key.op} of {_size(row.key.num_bytes)} on {row.key.communicator or '(no name)'}, "
            f"median {format_seconds(row.median_ns * NS)}"
            for row in largest[:_MOST]
        ),
    ]
    if len(largest) > _MOST:
        told.append(f"and {len(largest) - _MOST} more kinds of calls (lagom analyze shows them)")
    lines = [
        f"# Written by lagom init from {safe_name(Path(request.source).name)}. All keys: lagom docs formats.",
        *(f"#   {_safe_words(line)}" for line in told),
        "# Groups and model come from the trace; of this file [tune], [cluster] and [cost] count.",
        "",
        "[job]",
        _toml(name=safe_name(Path(request.source).name.partition(".")[0]) or "trace"),
        "",
        "[cluster]",
        _known(
            "preset",
            _seen(preset, request.out),
            f"the trace's GPU: {gpu}" if request.cluster is None else "as given",
            "",
        ),
        f"nodes = {max(1, -(-most // cluster.gpus_per_node))}    # {_ranks(most)}",
        "",
        "[tune]",
        'tuner = "ours"    # lagom list tuners',
        "pairs = 25    # of the verdict, at most",
    ]
    command = f"lagom tune {shlex.quote(str(request.out))} --from-trace {shlex.quote(request.source)}"
    text = "\n".join(lines) + "\n"
    return _written(request, {request.out: text.encode()}, told, (f"Next: {command}",))


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "unknown size"


def _ranks(most: int) -> str:
    return (
        f"the largest group has {most} ranks" if most > 0 else "the trace does not say how many ranks its groups have"
    )


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
        _toml(name=_seen_model(Path(name), request.out)) + "    # lagom list models; or a model file",
        f"seq_len = {request.seq_len}",
        "",
        "[cluster]",
        _toml(preset=_seen(request.cluster, request.out) or "") + "    # lagom list clusters; or a file of your own",
        *_node_lines(cluster),
        "",
        "[parallel]",
        *(f"{text}    # {said[key]}" if key in said else text for key, text in quoted.items()),
    ]
    return "\n".join(lines) + "\n"


def _verdict(step: JobStep, parallel: Mapping[str, Any]) -> _Verdict:
    """Whether it fits, and what a step is predicted to take."""
    try:
        check_memory(step)
    except LagomError as error:
        return _Verdict((), f"it does not fit: {error}")
    try:
        seconds = step.times.iteration_s
    except LagomError as error:
        return _Verdict((), f"it cannot run: {error}")
    need, has = format_memory(step.most_bytes), format_memory(step.cluster.gpu.memory_bytes)
    again = " with every layer recomputed" if parallel.get("recompute") == "full" else ""
    rate = step.layout.global_batch * step.seq_len / seconds
    is_tight = step.most_bytes > USABLE_MEMORY * step.cluster.gpu.memory_bytes
    how = "It barely fits" if is_tight else "It fits"
    lost = ", of which the allocator loses some to fragments" if is_tight else ""
    return _Verdict(
        (
            f"{how}{again}: {need} of {has} per GPU{lost}.",
            f"A step is predicted to take {format_seconds(seconds)}, {rate:,.0f} tokens/s.",
        )
    )


def _next_lines(request: _Whole, *, is_ranked: bool) -> tuple[str, ...]:
    """What to type next; where the layout is the first of a ranking, nothing ranks it again."""
    model = request.source
    lines = [f"Next: lagom simulate {shlex.quote(str(request.out))}"]
    if not model.endswith(".json") and not is_ranked:
        named = f"--model {shlex.quote(model)} --cluster {shlex.quote(request.cluster)}"
        ranks = f"{named} --gpus {request.num_gpus} --seq-len {request.seq_len}"
        lines.append(f"Which layout is the fastest: lagom simulate {ranks}")
    return tuple(lines)


def asked_for(ask: Callable[[str], str], tell: Callable[[str], object]) -> InitRequest:
    """The request that somebody answers question by question; `ask` puts one, `tell` says why an answer is none."""

    def answer(question: str, check: Callable[[str], T]) -> T:
        while True:
            try:
                return check(ask(question).strip())
            except LagomError as error:
                tell(str(error))

    def number(text: str) -> int:
        if not text.isdecimal() or not 0 < int(text[:10]) <= MAX_GPUS:
            raise JobError(f"{text!r} is no number of GPUs, must be 1 to {MAX_GPUS}")
        return int(text)

    def length(text: str) -> int:
        if text and (not text.isdecimal() or int(text[:10]) == 0):
            raise JobError(f"{text!r} is no number of tokens, must be 1 or more")
        return int(text[:10]) if text else SEQ_LEN

    def model(text: str) -> str:
        read_model(text)
        return text

    def machine(text: str) -> str:
        stated_cluster(ClusterTable(preset=text))
        return text

    def filled(text: str) -> int:
        cluster_of(name, number(text))
        return int(text)

    source = answer("Model (a name of lagom list models, a config.json, or a model file): ", model)
    name = answer("Cluster (a name of lagom list clusters, or a file): ", machine)
    cluster = stated_cluster(ClusterTable(preset=name))
    gpus = answer(f"GPUs ({cluster.gpus_per_node} a node): ", filled)
    seq_len = answer(f"Tokens per sequence (Enter: {SEQ_LEN}): ", length)
    return InitRequest(source=source, cluster=name, num_gpus=gpus, seq_len=seq_len)
