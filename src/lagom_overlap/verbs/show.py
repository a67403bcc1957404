"""`lagom show FILE`: what lagom writes or reads, in words: runs, plans, settings, tables, captures, job files."""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import msgspec

from lagom_overlap.capturing.file import FORMAT as CAPTURE_FORMAT
from lagom_overlap.capturing.file import read_capture
from lagom_overlap.collective import CommConfig
from lagom_overlap.errors import BundleError, JobError, LagomError, in_words
from lagom_overlap.export.saved import FORMAT as SAVED_FORMAT
from lagom_overlap.export.saved import read_saved
from lagom_overlap.jobfile.reading import MAX_JOB_BYTES
from lagom_overlap.jobfile.run_folder import RECORD, RunFolder, RunKind, SavedRun, job_command
from lagom_overlap.jobfile.variants import JobVariants
from lagom_overlap.nccl_plugin import table_layout
from lagom_overlap.nccl_plugin.table_reader import read_table
from lagom_overlap.planners.carriers import Carrier
from lagom_overlap.record import read_regular, starts_with
from lagom_overlap.report.proof import read_proof
from lagom_overlap.report.tune.verdict_words import config_text
from lagom_overlap.results.layouts import BEST_FILE
from lagom_overlap.results.listing import ShowResult
from lagom_overlap.results.tune import TuneResult
from lagom_overlap.toml_tables import parse_toml
from lagom_overlap.trace.reader import is_trace
from lagom_overlap.tuners.bundle import MAX_BUNDLE_BYTES
from lagom_overlap.tuners.journal import StepKind
from lagom_overlap.tuners.rows import GroupRow
from lagom_overlap.units import format_bytes, format_memory, format_percent, format_seconds
from lagom_overlap.verbs.load import load_run
from lagom_overlap.verbs.plan_file import MAX_PLAN_BYTES, check_plan_file
from lagom_overlap.verbs.saved_runs import REPORT, figures, verdict_words
from lagom_overlap.workload.models import load_model

_MAGIC: Final = table_layout.TABLE_MAGIC.to_bytes(8, "little")
_HEAD: Final = 4096
"""Bytes from which the kind of a file is told."""
_MAX_ENTRIES: Final = 6
"""Entries of a list in one line; the others are counted."""
_FORMS: Final = (
    "a run folder, a plan (plan.toml), configs.toml, saved settings (JSON), a plug-in table, a capture, a job file, "
    "a model file"
)
_Configs = dict[str, dict[str, dict[str, str | int]]]
"""Of configs.toml: knobs by collective, by group."""


def run_show(path: Path) -> ShowResult:
    """What a file or folder holds.

    Raises:
        LagomError: if it is missing, damaged, or nothing of ours.
    """
    if path.is_dir():
        return _proof(path)
    if not path.is_file():
        gone = "is a link that leads nowhere" if path.is_symlink() else "does not exist"
        raise JobError(f"{str(path)!r} {'is no regular file' if path.exists() else gone}; give {_FORMS}")
    if path.name == RECORD:
        return _proof(path.parent)
    if starts_with(path, _MAGIC):
        return _table(path)
    if path.suffix == ".toml":
        return _toml(path)
    if not starts_with(path, b"{", b"\x1f\x8b", b"SQLite"):
        raise JobError(f"{str(path)!r} is no file that lagom writes; give {_FORMS}")
    if f'"{SAVED_FORMAT}"'.encode() in _head(path):
        return _settings(path)
    if is_trace(path):
        raise JobError(f"{str(path)!r} is a profiler's trace: lagom analyze {path}")
    return _capture(path)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:  # a regular file: run_show has looked
            return file.read(_HEAD)
    except OSError as error:
        raise JobError(f"{str(path)!r} cannot be read: {error.strerror}") from None


def _proof(path: Path) -> ShowResult:
    """A run, and first of all what was proven there, if anything was."""
    saved, proof = RunFolder.read(path), read_proof(path)
    if proof is None:
        return _run(saved)
    lines = (f"decision: {proof.decision}", f"why: {proof.reason}", *_circumstances(saved))
    return ShowResult(path=path, what=f"a proof of {proof.subject}", said=lines, next=f"Next: {proof.next_line}")


def _run(saved: SavedRun) -> ShowResult:
    """What a run found, then what was asked for, when and where."""
    path, record = saved.path, saved.record
    lines, follow = list(_found(saved)), ""
    name = _typed(path)
    if conclusion := [line for line in lines if line.startswith("next: ")]:  # a training job ends with its own
        lines.remove(conclusion[0])
        follow = conclusion[0].removeprefix("next: ")
    if record.process is not None and not saved.has_no_process:  # perhaps: of another machine nobody knows
        follow = f"lagom watch {name}"
    elif saved.kind is RunKind.TUNE and (
        not isinstance(record.result, dict) or record.result.get("interrupted") or REPORT not in saved.files
    ):
        follow = f"lagom resume {name}"
    elif saved.kind is RunKind.TUNE and _is_adopted(record.result):
        follow = f"lagom export {name} --format plugin    # or: lagom open {name}"
    elif saved.kind is RunKind.LAYOUTS and BEST_FILE in saved.files:
        follow = f"lagom simulate {_typed(path / BEST_FILE)}    # or: lagom open {name}"
    elif not follow and REPORT in saved.files:
        follow = f"lagom open {name}"
    job = record.job.get("job") if isinstance(record.job, dict) else None
    of_job = f" of job {job['name']!r}" if isinstance(job, dict) and "name" in job else ""
    return ShowResult(
        path=path,
        what=f"a run of lagom {saved.kind.words}{of_job}",
        said=(*lines, *_searched(path), *_circumstances(saved)),
        next=f"Next: {follow}" if follow else "",
    )


def _found(saved: SavedRun) -> Iterator[str]:
    """The words of a run's result, and what it set; of one that cannot be typed, its verdict, figures and notes."""
    raw = saved.record.result
    if saved.kind is RunKind.TUNE and raw is None:
        gone = "cut off: its process is gone; what was measured is kept"
        yield gone if saved.has_no_process else "goes on, or its end is not known"
        return
    try:
        result = load_run(saved.path)
        lines = result.summary().splitlines()
        lines += _set_words(result) if isinstance(result, TuneResult) and not result.changes_nothing else ()
    except LagomError:  # a verb without a typed result, another version's, or a folder with a file less
        if not isinstance(raw, dict):
            return
        lines = [f"verdict: {words}"] if (words := verdict_words(raw)) else []
        lines += [_figure_text(*figure) for figure in figures(raw)]
        noted = [notes for key in ("notes", "warnings") if isinstance(notes := raw.get(key), list)]
        lines += [f"note: {note}" for notes in noted for note in notes]
    yield from (line for line in lines if not line.startswith("Written: "))


def _set_words(result: TuneResult) -> Iterator[str]:
    """What was found for each group, collectives of one setting together."""
    for group, comms in result.configs.items():
        alike: dict[str, list[str]] = {}
        for name, config in comms.items():
            alike.setdefault(config_text(config), []).append(name)
        for text, names in alike.items():
            yield f"found for {group}, {_short(names)}: {text}"


def _circumstances(saved: SavedRun) -> Iterator[str]:
    """What was asked for, when, where, with which versions; the folder's files."""
    record = saved.record
    asked = record.request if isinstance(record.request, dict) else {}
    for key, value in asked.items():
        if value is not None and value is not False and value != []:
            yield f"asked: {key} = {value}"
    if record.seed is not None and "seed" not in asked:
        yield f"seed: {record.seed}"
    yield f"date: {record.date}"
    yield f"machine: {_pairs(record.machine) or 'not recorded'}"
    yield f"versions: {_pairs(record.versions)}"
    yield f"files: {', '.join(saved.files)}"


def _typed(path: Path) -> str:
    """A path as a shell takes it."""
    return shlex.quote(str(path))


class _Line(msgspec.Struct, frozen=True):
    """A step of an online search's journal, as far as it is shown."""

    number: int
    kind: StepKind
    groups: dict[str, GroupRow]


def _searched(path: Path) -> list[str]:
    """The trials of an online search, from its journal: why, how long, and Lagom's H where the tuner has it.

    Groups are numbered where there are several: their names, which come first, would fill each line.
    """
    journals = sorted(path.glob("journal.*.jsonl"))
    if not journals:
        return []
    decoder = msgspec.json.Decoder(_Line)
    groups, trials, lines = dict[str, int](), list[tuple[int, int, str]](), list[str]()
    try:
        for text in read_regular(journals[0], MAX_BUNDLE_BYTES).splitlines()[1:]:
            line = decoder.decode(text)
            if line.kind is StepKind.SEARCH:
                for name, row in line.groups.items():
                    trials.append((line.number, groups.setdefault(name, len(groups) + 1), _trial(row)))
    except (OSError, ValueError) as error:  # msgspec's are ValueErrors
        lines.append(f"the journal {journals[0].name} cannot be read to its end: {error}")
    several = len(groups) > 1
    named = [f"group {group}: {name}" for name, group in groups.items()] if several else []
    found = [f"trial {number}{f', group {group}' if several else ''}: {words}" for number, group, words in trials]
    return [*named, *found, *lines]


def _trial(row: GroupRow) -> str:
    took = row.failure if row.measured is None else format_seconds(row.measured.makespan_s)
    metrics = ", ".join(f"{comm} {value:.3g}" for comm, value in row.priorities.items())
    return f"{row.reason or 'as before'}: {took}" + (f"; H: {metrics}" if metrics else "")


def _pairs(named: Mapping[str, str]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in named.items())


def _is_adopted(result: object) -> bool | None:
    """Whether a run's verdict adopted what it found; None where the run has no verdict."""
    verdict = result.get("verdict") if isinstance(result, dict) else None
    return verdict["adopted"] is True if isinstance(verdict, dict) and "adopted" in verdict else None


def _figure_text(name: str, unit: str, value: float) -> str:
    words = name.removesuffix(unit).replace(".", " ").replace("_", " ").strip()
    match unit:
        case "_per_s":
            return f"{words} per second: {value:,.0f}"
        case "_s":
            return f"{words}: {format_seconds(value)}"
        case "_bytes":
            return f"{words}: {format_memory(int(value))}"
        case _:
            return f"MFU: {format_percent(value)}"


def _toml(path: Path) -> ShowResult:
    try:
        raw = parse_toml(read_regular(path, MAX_PLAN_BYTES))
    except OSError as error:
        raise JobError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise JobError(f"{str(path)!r} is not TOML: {error}") from None
    if "plan" in raw and "job" not in raw:
        return _plan(path, raw)
    if "adopted" in raw:
        return _configs(path, raw)
    if "job" in raw:
        return _job(path)
    if "num_layers" in raw:
        return _model(path)
    raise JobError(f"{str(path)!r} is no file of ours: [job], [plan], num_layers or adopted is missing; give {_FORMS}")


def _model(path: Path) -> ShowResult:
    model = load_model(str(path))
    table = {field.name: getattr(model, field.name) for field in fields(model) if field.name != "name"}
    lines = [f"{model.num_params:,} parameters", *(f"{key} = {value}" for key, value in table.items() if value)]
    follow = f"Next: lagom init {_typed(path)} --cluster h100_dgx --gpus 8    # any of lagom list clusters"
    return ShowResult(path=path, what=f"a model file, {model.name!r}", said=tuple(lines), next=follow)


def _plan(path: Path, raw: Mapping[str, Any]) -> ShowResult:
    carrier = check_plan_file(path)  # from here on every key has its type
    head = raw["plan"]
    lines = [f"made by planner {head['planner']} for job {head.get('job') or 'unnamed'!r} on {head['num_ranks']} ranks"]
    lines += [f"times: {head['times']}"] if head.get("times") else []
    kinds = Counter(str(rewrite["rewrite"]) for rewrite in raw.get("rewrite", ()))
    lines += [f"{number} x {kind}" for kind, number in kinds.most_common()]
    for name in ("fsdp2", "megatron"):
        lines += [f"{name}: {key} = {_short(value)}" for key, value in raw.get(name, {}).items()]
    who = f"for {carrier}" if carrier is not None else "of a graph"
    follow = f"lagom plan JOB.toml --apply {_typed(path)}"
    if carrier is Carrier.FSDP2:
        follow = f"lagom run --prove {_typed(path)} -- COMMAND"
    return ShowResult(path=path, what=f"a plan {who}", said=tuple(lines), next=f"Next: {follow}")


def _short(value: object) -> str:
    """A value as a line holds it: of a long list the first entries, and how many there are."""
    if not isinstance(value, list):
        return str(value)
    shown = ", ".join(map(str, value[:_MAX_ENTRIES]))
    return f"{shown}, ... ({len(value)} in all)" if len(value) > _MAX_ENTRIES else shown or "none"


def _configs(path: Path, raw: Mapping[str, object]) -> ShowResult:
    try:
        groups = msgspec.convert(raw.get("groups", {}), _Configs)
        lines = tuple(
            f"{group} {comm}: {config_text(msgspec.convert(knobs, CommConfig))}"
            for group, comms in groups.items()
            for comm, knobs in comms.items()
        )
    except (msgspec.ValidationError, ValueError) as error:
        raise BundleError(f"{str(path)!r} is damaged: {in_words(str(error))}") from None
    if not isinstance(raw["adopted"], bool):
        raise BundleError(f"{str(path)!r} is damaged: adopted is {raw['adopted']!r}, must be true or false")
    adopted = "found faster by its verdict" if raw["adopted"] is True else "not adopted: the default stays"
    follow = f"Next: lagom export {_typed(path.parent)} --format plugin" if (path.parent / RECORD).is_file() else ""
    return ShowResult(path=path, what=f"settings of a run of lagom tune, {adopted}", said=lines, next=follow)


def _job(path: Path) -> ShowResult:
    content = read_regular(path, MAX_JOB_BYTES)
    variants = JobVariants.read(path, may_lack_work=True)
    spec = variants.spec(next(variants.combinations()))
    lines = [
        f"[{name}] {', '.join(f'{key} = {value!r}' for key, value in table.items())}"
        for name, table in parse_toml(content).items()
        if isinstance(table, dict)
    ]
    lines += [f"[[group]] {group.name}: {len(group.comm)} collectives, {group.count} times" for group in spec.group]
    verb = "simulate" if spec.model is not None else "plan" if spec.program is not None else "tune"
    what = f"a job file, {spec.job.name!r}"
    return ShowResult(path=path, what=what, said=tuple(lines), next=f"Next: lagom {verb} {_typed(path)}")


def _settings(path: Path) -> ShowResult:
    saved = read_saved(path)
    lines = [f"{saved.world_size} ranks, {saved.route}, saved {saved.date}", f"verdict: {saved.verdict}"]
    for setting in saved.settings:
        call = setting.site.call
        lines.append(
            f"{call.kind} of {format_bytes(call.num_bytes)} on {call.description!r}: {config_text(setting.config)}"
        )
    adopted = "adopted" if saved.is_adopted else "none: the default was not beaten"
    follow = f"Next: lagom run --config {_typed(path)} -- {job_command(path)}"
    return ShowResult(path=path, what=f"settings of a tuned job, {adopted}", said=tuple(lines), next=follow)


def _table(path: Path) -> ShowResult:
    table = read_table(path)
    lines = [
        f"{row.kind} of {format_bytes(row.first_bytes)} to {format_bytes(row.last_bytes)} on "
        f"{row.communicator.description!r} ({row.communicator.num_ranks} ranks): {config_text(row.config)}"
        for row in table.decisions
    ]
    what = f"a table of the tuner plug-in, {len(table.communicators)} communicators"
    return ShowResult(
        path=path, what=what, said=tuple(lines), next=f"Next: lagom run --config {_typed(path)} -- COMMAND"
    )


def _capture(path: Path) -> ShowResult:
    head = _head(path)
    if b'"model_type"' in head:
        follow = f"lagom init {_typed(path)} --cluster NAME --gpus N"
        raise JobError(f"{str(path)!r} is a model's config.json: {follow}")
    if CAPTURE_FORMAT.encode() not in head and head[:1] == b"{":
        raise JobError(f"{str(path)!r} is no file that lagom writes; give {_FORMS}")
    step = read_capture(path)
    iteration = step.iteration
    kinds = Counter(str(comm.collective.kind) for comm in iteration.comms)
    moved = Counter[str]()
    for comm in iteration.comms:
        moved[str(comm.collective.kind)] += comm.collective.num_bytes
    lines = [f"{len(iteration.ops)} operators of one of {step.num_ranks} ranks"]
    lines += [f"{number} x {kind}, {format_bytes(moved[kind])} in all" for kind, number in kinds.most_common()]
    lines += [f"communicator {name}: {len(ranks)} ranks" for name, ranks in step.groups.items()]
    lines += [f"note: {note}" for note in step.notes]
    follow = f"Next: lagom plan {_typed(path)} --cluster h100_dgx    # any of lagom list clusters"
    return ShowResult(path=path, what=f"a captured step, {iteration.name!r}", said=tuple(lines), next=follow)
