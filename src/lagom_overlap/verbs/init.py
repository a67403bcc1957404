"""`lagom init SOURCE`: a commented job file, from a model's name, a `config.json`, a model file, a script or a trace.

A training script is read as text (`init_script.py`); what it does not say, the job file leaves to be filled in. Of a
profiler's trace, ranks, groups and collectives are told, and the job is one for `lagom tune --from-trace`.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, TypeVar

import tomli_w

from lagom_overlap.analysis.findings import analyse
from lagom_overlap.analysis.trace_gpu import cluster_of_trace
from lagom_overlap.errors import JobError, LagomError, OutputError
from lagom_overlap.hardware import Cluster
from lagom_overlap.jobfile.memory import check_memory
from lagom_overlap.jobfile.spec import MAX_JOB_BYTES, ClusterTable, moved, parse_job
from lagom_overlap.jobfile.step import SEQ_LEN, JobStep, cluster_of, job_step, stated_cluster
from lagom_overlap.record import read_regular, write_private
from lagom_overlap.trace.files import distinct_files
from lagom_overlap.trace.reader import is_trace, read_traces
from lagom_overlap.units import NS, format_bytes, format_memory, format_seconds
from lagom_overlap.verbs.init_config import read_model, safe_name
from lagom_overlap.verbs.init_script import ScriptFacts, Told, read_script
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


def run_init(request: InitRequest) -> InitResult:
    """Writes the job file, and a model file next to it where a `config.json` was read; a check writes neither.

    Raises:
        LagomError: if the source is none of the above, the GPUs fill no nodes, or a file is there already.
    """
    source = Path(request.source)
    if source.suffix == ".py":
        return _of_script(request, read_script(source))
    if source.is_dir() or (source.is_file() and source.suffix != ".toml" and is_trace(source)):
        return _of_trace(request)
    if request.cluster is None or request.num_gpus is None:
        raise JobError(f"a job of a model needs --cluster NAME and --gpus N: lagom init {request.source} --cluster ...")
    whole = _Whole(
        request.source, request.cluster, request.num_gpus, request.seq_len or SEQ_LEN, request.out, request.only_checks
    )
    return _of_model(whole)


class _Whole(NamedTuple):
    """A request of which everything is known."""

    source: str
    cluster: str
    num_gpus: int
    seq_len: int
    out: Path
    only_checks: bool


def _of_model(request: _Whole) -> InitResult:
    model, model_text = read_model(request.source)
    cluster = cluster_of(request.cluster, request.num_gpus)
    if not request.out.name:
        raise OutputError(f"--out {str(request.out)!r}: must be a file's name, such as job.toml")
    files = {request.out: b""}
    name = request.source
    if model_text:
        model_path = request.out.with_name(f"{model.name}.model.toml")
        name = str(model_path)
        if not model_path.is_file() or read_regular(model_path, MAX_JOB_BYTES) != model_text:
            files[model_path] = model_text
    for path in files:
        _check_new(path)
    with TemporaryDirectory() as folder:
        own = Path(folder) / "model.toml"
        own.write_bytes(model_text)
        parallel, step = _first_that_fits(request, str(own) if model_text else name)
    notes = _notes(step, parallel)
    if request.only_checks:
        return InitResult(files=(), notes=notes)
    files[request.out] = _job_text(request, name, model, cluster, parallel).encode()
    for path, content in reversed(files.items()):  # the job file last: it names the other
        write_private(path, content)
    return InitResult(files=tuple(files), notes=notes, next=_next_lines(request))


def _check_new(path: Path) -> None:
    if path.exists():
        raise OutputError(f"{str(path)!r} is there already, must not exist: give another --out")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"folder {str(path.absolute().parent)!r} does not exist")


def _written(request: InitRequest, text: str, notes: Sequence[str], following: Sequence[str]) -> InitResult:
    """One file, unless only its notes are wanted."""
    if request.only_checks:
        return InitResult(files=(), notes=tuple(notes))
    _check_new(request.out)
    write_private(request.out, text.encode())
    return InitResult(files=(request.out,), notes=tuple(notes), next=tuple(following))


def _of_script(request: InitRequest, facts: ScriptFacts) -> InitResult:
    """What the script says, each key with the line that says it; the rest as comments to fill in."""
    source = Path(request.source)
    name = safe_name(source.stem) or "job"
    models = [(found, named) for named in facts.models if (found := _known_model(str(named.value))) is not None]
    model = models[0][0] if models else None
    lines = [
        f"# Written by lagom init from {safe_name(source.name)}, which was not run. All keys: lagom docs formats.",
        f"# Lines with {FILL_IN!r} are what it does not say.",
        "",
        "[job]",
        _toml(name=name),
        "",
        "[model]",
        _known("name", model, models[0][1].where if models else _unknown_model(facts), "llama-3-8b"),
        _told("seq_len", request.seq_len, facts.sizes.get("seq_len"), "tokens per sequence", SEQ_LEN),
        "",
        "[cluster]",
        _known("preset", _seen(request.cluster, request.out), "lagom list clusters; or a file of your own", "h100_dgx"),
        *_nodes(request),
        "",
        "[parallel]",
    ]
    framework = facts.framework
    lines.append(
        _known("framework", None if framework is None else str(framework.value),
               "lagom list frameworks" if framework is None else framework.where, "fsdp2")
    )  # fmt: skip
    lines += [f"{key} = {named.value}    # {_safe_words(named.where)}" for key, named in facts.degrees.items()]
    if not facts.degrees and framework is not None and str(framework.value).startswith("fsdp"):
        lines.append(_known("fsdp", request.num_gpus, "GPUs that share the parameters", "8"))
    lines.append(_told("micro_batch", None, facts.sizes.get("micro_batch"), "sequences per GPU and forward", 1))
    accumulated = facts.sizes.get("num_micro_batches")
    if accumulated is not None:
        lines.append(
            f"# global_batch = ...    # {FILL_IN}: {accumulated.value} micro-batches are accumulated "
            f"({_safe_words(accumulated.where)}), times sequences, times data-parallel GPUs"
        )
    text = "\n".join(lines) + "\n"
    open_keys = [line.split("=")[0].lstrip("# ").strip() for line in lines if FILL_IN in line and "=" in line]
    notes = [f"The script says: {what}" for what in _said(facts)] or ["The script says nothing of its sizes."]
    notes += [f"Not told: {what}" for what in facts.unread]
    starts = "python" if facts.framework is None else "torchrun --nproc-per-node 2"
    command = f"lagom run --observe -- {starts} {shlex.quote(request.source)}"
    out = shlex.quote(str(request.out))
    if open_keys:
        notes.append(f"To fill in: {', '.join(open_keys)}.")
        following = (f"Next: fill in {out}, then: lagom simulate {out}",)
    else:
        following = (f"Next: lagom simulate {out}",)
    return _written(request, text, notes, (*following, f"What it does when it runs: {command}"))


def _said(facts: ScriptFacts) -> Iterator[str]:
    if facts.framework is not None:
        yield f"{facts.framework.value} ({facts.framework.where})"
    if facts.backend is not None:
        yield f"backend {facts.backend.value} ({facts.backend.where})"
    for named in (facts.degrees, facts.sizes):
        yield from (f"{key.replace('_', ' ')} {fact.value} ({fact.where})" for key, fact in named.items())
    yield from (f"model {fact.value} ({fact.where})" for fact in facts.models)


def _known_model(said: str) -> str | None:
    """The model of ours with a published model's name: its last part without what tells its tunings apart."""
    last = said.rstrip("/").rpartition("/")[2].lower()
    bare = re.sub(r"^meta-|(-hf|-instruct|-base|-chat|-it|-v[0-9.]+)+$", "", last)
    return next((name for name in model_names() if name in (last, bare)), None)


def _unknown_model(facts: ScriptFacts) -> str:
    if not facts.models:
        return "lagom list models, or a model file; or lagom capture SCRIPT.py:FUNCTION"
    return f"{_safe_words(str(facts.models[0].value))} is not known here: a model file, or lagom init config.json"


def _nodes(request: InitRequest) -> Sequence[str]:
    if request.cluster is None or request.num_gpus is None:
        return (f"# nodes = 1    # {FILL_IN}",)
    return _node_lines(cluster_of(request.cluster, request.num_gpus))


def _node_lines(cluster: Cluster) -> Sequence[str]:
    each = (f"gpus_per_node = {cluster.gpus_per_node}",) if cluster.num_nodes == 1 else ()
    return (f"nodes = {cluster.num_nodes}", *each)


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
    facts = [
        f"{len(findings.ranks)} ranks on {gpu}",
        *(f"group {name or '(no name)'}: {number or 'unknown'} ranks" for name, number in list(groups.items())[:_MOST]),
        *(
            f"{row.count} x {row.key.op} of {_size(row.key.num_bytes)} on {row.key.communicator or '(no name)'}, "
            f"median {format_seconds(row.median_ns * NS)}"
            for row in largest[:_MOST]
        ),
    ]
    if len(largest) > _MOST:
        facts.append(f"and {len(largest) - _MOST} more kinds of calls (lagom analyze shows them)")
    lines = [
        f"# Written by lagom init from {safe_name(Path(request.source).name)}. All keys: lagom docs formats.",
        *(f"#   {_safe_words(line)}" for line in facts),
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
    return _written(request, "\n".join(lines) + "\n", facts, (f"Next: {command}",))


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "unknown size"


def _ranks(most: int) -> str:
    return (
        f"the largest group has {most} ranks" if most > 0 else "the trace does not say how many ranks its groups have"
    )


def _first_that_fits(request: _Whole, model: str) -> tuple[Mapping[str, Any], JobStep]:
    """FSDP over all GPUs, and with every layer recomputed where that does not fit; one GPU without it.

    A start, not advice: which layout is the fastest is `lagom simulate --model`'s question.
    """
    plain: dict[str, Any] = {"fsdp": request.num_gpus} if request.num_gpus > 1 else {"framework": "ddp"}
    smallest: tuple[Mapping[str, Any], JobStep] | None = None
    for parallel in (plain, {**plain, "recompute": "full"}):
        tables = {
            "job": {"name": "init"},
            "model": {"name": model, "seq_len": request.seq_len},
            "cluster": {"preset": request.cluster},
            "parallel": parallel,
        }
        step = job_step(parse_job(tables, "lagom init"))
        assert step is not None, model
        smallest = parallel, step
        if step.fits:
            break
    assert smallest is not None
    return smallest


def _job_text(
    request: _Whole, name: str, model: TransformerModel, cluster: Cluster, parallel: Mapping[str, Any]
) -> str:
    seen = moved({"model": {"name": name}}, Path(), request.out.parent)["model"]["name"]
    quoted = {key: tomli_w.dumps({key: value}).strip() for key, value in parallel.items()}
    comments = {
        "fsdp": "fully sharded data parallelism over this many GPUs; or data, tensor, pipeline, context, expert",
        "framework": "fsdp2, ddp, torchtitan, megatron, ... (lagom list frameworks)",
        "recompute": "none, selective, full: without it this does not fit",
    }
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
        _toml(name=seen) + "    # lagom list models; or a model file",
        f"seq_len = {request.seq_len}",
        "",
        "[cluster]",
        _toml(preset=_seen(request.cluster, request.out) or "") + "    # lagom list clusters; or a file of your own",
        *_node_lines(cluster),
        "",
        "[parallel]",
        *(f"{text}    # {comments[key]}" for key, text in quoted.items()),
        "micro_batch = 1    # sequences per GPU",
    ]
    return "\n".join(lines) + "\n"


def _notes(step: JobStep, parallel: Mapping[str, Any]) -> tuple[str, ...]:
    """Whether it fits, and what a step is predicted to take."""
    try:
        check_memory(step)
    except LagomError as error:
        return (f"It does not fit as it stands: {error}",)
    need, has = format_memory(step.most_bytes), format_memory(step.cluster.gpu.memory_bytes)
    again = " with every layer recomputed" if "recompute" in parallel else ""
    seconds = step.times.iteration_s
    rate = step.layout.global_batch * step.seq_len / seconds
    return (
        f"It fits{again}: {need} of {has} per GPU.",
        f"A step is predicted to take {format_seconds(seconds)}, {rate:,.0f} tokens/s.",
    )


def _next_lines(request: _Whole) -> tuple[str, ...]:
    """What to type next."""
    model = request.source
    lines = [f"Next: lagom simulate {shlex.quote(str(request.out))}"]
    if not model.endswith(".json"):
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
