"""The reading of a job file: TOML checked key by key. A job file is data; nothing in it is run.

`read_job` gives a `JobSpec` or raises a `JobError` of one line that names the key, the value and what is allowed.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import msgspec

from lagom_overlap.errors import JobError, MissingDependencyError, UnknownNameError, allowed_names, in_words
from lagom_overlap.jobfile.spec import JobSpec, ModelTable, SpaceTable, TimesSource, link_bytes_per_s
from lagom_overlap.record import read_regular, starts_with
from lagom_overlap.registry import BACKENDS, PLANNERS, TUNERS, checked_options, entry_point_names, load
from lagom_overlap.toml_tables import keys_of, parse_toml, size_bytes, table_in, types_at, value_at
from lagom_overlap.workload.parallel import ParallelTable
from lagom_overlap.workload.precision import ATTENTION_FORMATS

MAX_JOB_BYTES: Final = 1 << 20
"""A job file above 1 MiB is refused: it is not one that a person wrote."""


def read_job(path: Path, *, may_lack_work: bool = False) -> JobSpec:
    """The job file at `path`. With `may_lack_work` it need not say what it trains: a command or a trace does.

    Raises:
        JobError: if it is missing, unreadable, oversized, no TOML, or holds what is not allowed.
    """
    return seen_from(parse_job(read_tables(path), str(path), may_lack_work=may_lack_work), path.parent)


def read_tables(path: Path) -> dict[str, Any]:  # any TOML value
    """The tables of the job file at `path`, unchecked.

    Raises:
        JobError: if it is missing, unreadable, oversized or no TOML.
    """
    _refuse_other_kinds(path)
    try:
        content = read_regular(path, MAX_JOB_BYTES)
    except FileNotFoundError:
        raise JobError(f"job file {str(path)!r} does not exist") from None
    except OSError as error:
        raise JobError(f"job file {str(path)!r} cannot be read: {error.strerror}") from None
    try:
        return parse_toml(content)
    except UnicodeDecodeError as error:
        raise JobError(f"job file {str(path)!r} is not UTF-8 text (byte {error.start})") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        raise JobError(f"job file {str(path)!r} is not TOML: {error}") from None


_OTHERS: Final = (b"\x1f\x8b", b"{", b"SQLite format 3")
"""How gzip, JSON and Nsight's exports begin; no TOML does."""


def _refuse_other_kinds(path: Path) -> None:
    """Refuses what is for another verb, and names that verb.

    Raises:
        JobError: if it is a folder, a trace or a capture.
    """
    if path.is_dir():
        raise JobError(f"{str(path)!r} is a folder, no job file; if it holds traces: lagom analyze {path}")
    if not starts_with(path, *_OTHERS):
        return
    from lagom_overlap.trace.reader import is_trace  # noqa: PLC0415 - decoders of traces, for a mistake

    if is_trace(path):
        raise JobError(
            f"{str(path)!r} is a profiler's trace, no job file: lagom analyze {path} says what overlaps in it, "
            f"lagom tune --from-trace {path} what tuning would gain"
        )
    raise JobError(
        f"{str(path)!r} is no job file; if it is a capture, a job file names it: [job] name, [model] capture = "
        f"{str(path)!r}, [cluster] preset (lagom plan takes one without, with --cluster)"
    )


_FILES: Final[Mapping[tuple[str, str], Callable[[str], bool]]] = {
    ("cluster", "preset"): lambda name: name.endswith(".toml"),
    ("cluster", "gpu"): lambda name: name.endswith(".toml"),
    ("model", "name"): lambda name: name.endswith(".toml"),
    ("model", "capture"): lambda _: True,
    ("tune", "warm_start"): lambda _: True,
    ("plan", "times"): lambda name: name not in list(TimesSource),
    ("program", "script"): lambda _: True,
}
"""Keys that name a file, as seen from the job file's folder, and whether a value is one and no preset or word."""


def seen_from(spec: JobSpec, folder: Path) -> JobSpec:
    """The job, its paths as seen from where we are, not from the job file's folder."""
    for (table, key), is_file in _FILES.items():
        part = getattr(spec, table)
        name = None if part is None else getattr(part, key)
        if name is None or not is_file(name):
            continue
        seen = str(folder / name)
        if not is_file(seen):  # a Path drops the ./ of ./measure, which is no word
            seen = os.path.join(folder, name)  # noqa: PTH118
        spec = msgspec.structs.replace(spec, **{table: msgspec.structs.replace(part, **{key: seen})})
    return spec


def moved(tables: Mapping[str, Any], source: Path, target: Path) -> dict[str, Any]:
    """The tables of a job file in folder `source` for one in folder `target`: relative paths name the same files."""
    own = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    for (table, key), is_file in _FILES.items():
        part = own.get(table)
        name = part.get(key) if isinstance(part, dict) else None
        if isinstance(part, dict) and isinstance(name, str) and is_file(name) and not Path(name).is_absolute():
            part[key] = os.path.relpath(source / name, target)
            if not is_file(part[key]):
                part[key] = os.path.join(os.curdir, part[key])  # noqa: PTH118
    return own


def parse_job(raw: dict[str, Any], where: str, *, may_lack_work: bool = False) -> JobSpec:
    """A decoded TOML document as a `JobSpec`.

    Raises:
        JobError: naming the key, its value and what is allowed.
        UnknownNameError: if there is no tuner, planner or backend that it names.
    """
    try:
        spec = msgspec.convert(raw, JobSpec)
    except msgspec.ValidationError as error:
        raise JobError(f"{where}: {_explain(str(error), raw)}") from None
    for key in raw.get("parallel", {}):  # decoded to a dataclass, of which msgspec lets unknown keys pass
        if key not in keys_of(ParallelTable):
            raise JobError(f"{where}: {_unknown('parallel.', key, ParallelTable)}")
    _check_together(spec, where, may_lack_work=may_lack_work)
    _check_named(spec)
    for key, size in _sizes(spec):
        size_bytes(size, f"{where}: {key}")
    return spec


def _sizes(spec: JobSpec) -> Iterator[tuple[str, str | int]]:
    """Sizes that a file may write with a unit, each with its key: a wrong one is refused whichever verb reads it."""
    if spec.plan.memory_limit is not None:
        yield "plan.memory_limit", spec.plan.memory_limit
    if spec.parallel is not None and spec.parallel.bucket_bytes is not None:
        yield "parallel.bucket_bytes", spec.parallel.bucket_bytes
    for key in ("chunk_bytes", "slice_bytes"):
        yield from ((f"tune.space.{key}", size) for size in getattr(spec.tune.space, key) or ())


def _check_named(spec: JobSpec) -> None:
    """Refuses names that nothing is registered under, and options that what they name has not, whoever reads them.

    Raises:
        UnknownNameError: naming what there is.
        JobError: for an option.
    """
    named: tuple[tuple[str, str, str | None, Mapping[str, object], str], ...] = (
        (TUNERS, "tuner", spec.tune.tuner, spec.tune.options, "tune"),
        (PLANNERS, "planner", spec.plan.planner, spec.plan.options, "plan"),
        (BACKENDS, "backend", spec.job.backend, {}, "job"),
    )
    for group, what, name, options, table in named:
        if name is not None and name not in (known := entry_point_names(group)):
            raise UnknownNameError.among(what, name, known)
        if name is not None and options:
            with suppress(MissingDependencyError):  # told by the verb that needs it
                checked_options(load(group, what, name), name, options, what=what, table=table)


def _check_together(spec: JobSpec, where: str, *, may_lack_work: bool) -> None:
    num_kinds = (spec.model is not None) + bool(spec.group) + (spec.program is not None)
    if num_kinds != 1 and not (may_lack_work and num_kinds == 0):
        raise JobError(
            f"{where}: give either [model] with [parallel] and [cluster], or at least one [[group]], or [program]"
        )
    if spec.model is not None and spec.model.capture is not None:
        _check_captured(spec, spec.model, where)
    elif spec.model is not None:
        missing_keys = [key for key in ("name", "seq_len") if getattr(spec.model, key) is None]
        if missing_keys:
            raise JobError(f"{where}: missing key 'model.{missing_keys[0]}'")
    if spec.model is not None and spec.model.capture is None and (spec.parallel is None or spec.cluster is None):
        missing = "[parallel]" if spec.parallel is None else "[cluster]"
        raise JobError(f"{where}: [model] needs {missing} too")
    if spec.model is None and spec.parallel is not None:
        raise JobError(f"{where}: [parallel] has no meaning without [model]")
    if spec.parallel is not None:
        _check_parallel(spec.parallel, where)
    link_bytes_per_s(spec.job.link)
    _check_groups(spec, where)
    space = spec.tune.space
    for key in keys_of(SpaceTable):
        if getattr(space, key) == []:
            raise JobError(f"{where}: tune.space.{key} is [], must name at least one value")
    if space.chunk_bytes is not None and space.slice_bytes is not None:
        raise JobError(f"{where}: tune.space: give chunk_bytes or slice_bytes, not both")


def _check_groups(spec: JobSpec, where: str) -> None:
    for index, group in enumerate(spec.group):
        place = f"{where}: group[{index}]"
        if (group.block is None) == (not group.op):
            raise JobError(f"{place} {group.name!r}: give either block or op, one of the two")
        if group.block is not None and group.block.hidden % group.block.heads:
            raise JobError(f"{place}.block: hidden {group.block.hidden} is not a multiple of heads {group.block.heads}")
        for number, op in enumerate(group.op):
            if sum(work is not None for work in (op.gemm, op.attention, op.memory)) != 1:
                raise JobError(f"{place}.op[{number}] {op.name!r}: give exactly one of gemm, attention, memory")


def _check_captured(spec: JobSpec, model: ModelTable, where: str) -> None:
    for key in ("name", "seq_len", "mtp_layers"):
        if getattr(model, key) is not None:
            raise JobError(f"{where}: model.capture already says model.{key}: give one of the two")
    if spec.parallel is not None:
        raise JobError(f"{where}: [parallel] has no meaning with model.capture: the captured step is parallel already")
    if spec.cluster is None:
        raise JobError(f"{where}: [model] needs [cluster] too")


def _check_parallel(parallel: ParallelTable, where: str) -> None:
    if parallel.auto is not None:
        kept = {"auto", "micro_batch", "global_batch"}
        for field in fields(parallel):
            if field.name not in kept and getattr(parallel, field.name) != field.default:
                raise JobError(
                    f"{where}: parallel.auto searches for the sharding: parallel.{field.name} has no meaning with it"
                )
    if parallel.fsdp is None:
        return
    if parallel.data is not None:
        raise JobError(f"{where}: parallel.fsdp already says parallel.data: give one of the two")
    if parallel.zero_stage not in (None, 2, 3):
        raise JobError(
            f"{where}: parallel.zero_stage is {parallel.zero_stage}: with parallel.fsdp, which shards parameters, "
            "must be 3 or 2 (parameters kept after forward)"
        )


_PATH: Final = re.compile(r" - at `\$?(.*)`$")
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(.*)`$")
_MISSING: Final = re.compile(r"^Object missing required field `(.*)`$")


def _unknown(place: str, key: str, table: type) -> str:
    allowed = sorted(keys_of(table))
    return f"unknown key {place + key!r}{allowed_names(key, allowed)}"


def _explain(message: str, raw: dict[str, Any]) -> str:
    """One line for a msgspec complaint: the key, the value, what is allowed."""
    place = _PATH.search(message)
    path = place[1] if place else ""
    complaint = message[: place.start()] if place else message
    key = path.lstrip(".")
    if unknown := _UNKNOWN.match(complaint):
        table = table_in(types_at(JobSpec, path))
        assert table is not None, path
        return _unknown(f"{key}.".lstrip("."), unknown[1], table)
    if missing := _MISSING.match(complaint):
        return f"missing key {f'{key}.{missing[1]}'.lstrip('.')!r}"
    try:
        value = repr(value_at(raw, path))
    except (KeyError, IndexError, TypeError):
        value = "?"
    words = in_words(complaint)
    return f"{key} is {value[:80]}{',' if words.startswith('must') else ':'} {words}" + _enum_hint(path)


def _enum_hint(path: str) -> str:
    if path in (".precision.attention", ".precision.head"):
        return f"; allowed: {', '.join(ATTENTION_FORMATS)}"
    enum = next((one for one in types_at(JobSpec, path) if issubclass(one, StrEnum)), None)
    return "" if enum is None else f"; allowed: {', '.join(enum)}"
