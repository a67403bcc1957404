"""The files that `lagom init` writes: the lines of a job file, and the writing of what is not there yet."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tomli_w

from lagom_overlap.errors import OutputError
from lagom_overlap.hardware import Cluster
from lagom_overlap.jobfile.reading import MAX_JOB_BYTES, moved
from lagom_overlap.record import read_regular, write_private
from lagom_overlap.verbs.init_script import Told

FILL_IN: Final = "fill in"


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


def written(
    request: InitRequest, files: Mapping[Path, bytes], notes: Sequence[str], following: Sequence[str], refused: str = ""
) -> InitResult:
    """The files, of which the job file is the last; none where only what they lead to is asked for."""
    if request.only_checks:
        again = shlex.join(words_of(request))
        return InitResult(
            files=(), notes=tuple(notes), next=(f"Next: lagom init {again}    # writes it",), refused=refused
        )
    new = {path: content for path, content in files.items() if path == request.out or not _holds(path, content)}
    for path in new:
        check_new(path)
    for path, content in new.items():  # the job file last: it names the other
        write_private(path, content)
    told = (f"As it stands, {refused}",) if refused else ()
    return InitResult(files=tuple(reversed(new)), notes=(*notes, *told), next=tuple(following))


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and read_regular(path, MAX_JOB_BYTES) == content


def check_new(path: Path) -> None:
    """Refuses a path where no file can be written, or one is already.

    Raises:
        OutputError: saying why.
    """
    if not path.name:
        raise OutputError(f"--out {str(path)!r}: must be a file's name, such as job.toml")
    if os.path.lexists(path):  # a link that leads nowhere is somebody's, too
        raise OutputError(f"{str(path)!r} is there already, must not exist: give another --out")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"folder {str(path.absolute().parent)!r} does not exist")


def words_of(request: InitRequest) -> Iterator[str]:
    """The command line of a request, without `--check`."""
    yield request.source
    named = {"cluster": request.cluster, "gpus": request.num_gpus, "seq-len": request.seq_len, "out": request.out}
    default = InitRequest(source="").out
    for flag, value in named.items():
        if value is not None and value != default:
            yield from (f"--{flag}", str(value))


def node_lines(cluster: Cluster) -> Sequence[str]:
    """The lines of `[cluster]` about its nodes."""
    each = (f"gpus_per_node = {cluster.gpus_per_node}",) if cluster.num_nodes == 1 else ()
    return (f"nodes = {cluster.num_nodes}", *each)


def seen_from_job(table: str, key: str, name: str, out: Path) -> str:
    """A name, or the path of a file as the job file names it."""
    seen: str = moved({table: {key: name}}, Path(), out.parent)[table][key]
    return seen


def known_line(key: str, value: str | int | None, why: str, example: str) -> str:
    """A key with its value; commented, with an example, where there is none."""
    if value is not None:
        return f"{toml_line(**{key: value})}    # {safe_words(why)}"
    shown = example if example.isdecimal() else f'"{example}"'
    return f"# {key} = {shown}    # {FILL_IN}: {safe_words(why)}"


def told_line(key: str, given: int | None, told: Told | None, what: str, default: int) -> str:
    """A number as given, or as the script says it; commented, with a default, where neither does."""
    if given is not None:
        return f"{key} = {given}    # {what}, as given"
    if told is not None:
        return f"{key} = {told.value}    # {what}; {safe_words(told.where)}"
    return f"# {key} = {default}    # {FILL_IN}: {what}"


def toml_line(**table: str | int) -> str:
    """A key and its value."""
    return tomli_w.dumps(table).strip()


def safe_words(text: str) -> str:
    """Text of a file for a comment: on one line, without what is no word."""
    return "".join(char if char.isprintable() else "?" for char in text)[:200]
