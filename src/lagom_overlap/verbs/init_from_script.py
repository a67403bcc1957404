"""The job file of a training script: each key with the line that says it, the rest as comments to fill in.

The script is read as text (`init_script.py`), never run.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

from lagom_overlap.errors import JobError, LagomError
from lagom_overlap.jobfile.reading import parse_job
from lagom_overlap.jobfile.step import SEQ_LEN, cluster_of, job_step
from lagom_overlap.verbs.init_check import JobCheck, checked
from lagom_overlap.verbs.init_config import model_file, safe_name, unwritten
from lagom_overlap.verbs.init_file import (
    FILL_IN,
    InitRequest,
    InitResult,
    known_line,
    node_lines,
    safe_words,
    seen_from_job,
    told_line,
    toml_line,
    written,
)
from lagom_overlap.verbs.init_script import ScriptFacts, Told
from lagom_overlap.workload.models import model_names


def job_of_script(request: InitRequest, facts: ScriptFacts) -> InitResult:
    """What the script says, each key with the line that says it; the rest as comments to fill in."""
    source = Path(request.source)
    stem = safe_name(source.stem) or "job"
    num_gpus = _gpus(request, facts)
    model_path = request.out.parent / f"{stem}.model.toml"
    model, model_text = _script_model(facts, source, stem)
    seen = model.value if not model_text else seen_from_job("model", "name", str(model_path), request.out)
    lines = [
        f"# Written by lagom init from {safe_name(source.name)}, which was not run. All keys: lagom docs formats.",
        f"# Lines with {FILL_IN!r} are what it does not say.",
        "",
        "[job]",
        toml_line(name=stem),
        "",
        "[model]",
        known_line("name", seen or None, model.where, "llama-3-8b"),
        told_line("seq_len", request.seq_len, facts.sizes.get("seq_len"), "tokens per sequence", SEQ_LEN),
        "",
        "[cluster]",
        known_line(
            "preset",
            request.cluster and seen_from_job("cluster", "preset", request.cluster, request.out),
            "lagom list clusters; or a file of your own",
            "h100_dgx",
        ),
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
    return written(request, files | {request.out: text.encode()}, notes, following, refused)


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
    yield known_line("framework", framework, why, "fsdp2")
    yield from (f"{key} = {told.value}    # {safe_words(told.where)}" for key, told in facts.degrees.items())
    shared = facts.num_ranks if facts.is_whole_mesh else None
    if not facts.degrees and framework is not None:
        is_fsdp = framework.startswith("fsdp")
        key, what = ("fsdp", "GPUs that share the parameters") if is_fsdp else ("data", "data-parallel GPUs")
        shared = num_gpus if is_fsdp or framework == "ddp" else None
        yield known_line(key, None if shared == 1 else shared, what, "8")
    yield told_line("micro_batch", None, facts.sizes.get("micro_batch"), "sequences per GPU and forward", 1)
    accumulated, each = facts.sizes.get("num_micro_batches"), facts.sizes.get("micro_batch")
    if accumulated is None:
        return
    said = f"{accumulated.value} micro-batches are accumulated ({safe_words(accumulated.where)})"
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


def _leads_to(text: str, request: InitRequest, model_text: bytes) -> JobCheck:
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
            return JobCheck((), f"it cannot run as it stands: {error}")
    assert step is not None, text
    return checked(step, tables["parallel"])


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
    return f"{safe_words(str(facts.models[0].value))} is not known here: a model file, or lagom init config.json"


def _nodes(cluster: str | None, num_gpus: int | None) -> Sequence[str]:
    if cluster is None or num_gpus is None:
        return (f"# nodes = 1    # {FILL_IN}",)
    return node_lines(cluster_of(cluster, num_gpus))
