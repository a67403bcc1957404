"""Which job of a run this process is a rank of, and which rank, before NCCL and we make files that are named after it.

All that is started below `lagom run` has its environment: a torchrun that a rank starts, the next training of a script,
spawned ranks that were told their number in an argument. The run's folder is the first job's, `nested-1` in it the
second's, and so on, so that no file holds two jobs' numbers; nor does another job decide by the table of one of another
size.

A job is known by where its ranks meet (MASTER_PORT, or what `init_process_group` was told): that is the same on all of
its ranks, no two jobs have it at once, and torchrun keeps it through restarts, which go on in the same files. Two jobs
that meet at one place after each other are told apart by torchrun's folder of logs, new with each; where something else
starts them they count as a restart. `.job.N` says who took which place: written aside, then linked, whole or not there.
"""

import os
import socket
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import msgspec

from lagom_overlap.errors import OutputError
from lagom_overlap.export.run_variables import FIRST_WORLD_VARIABLE, FOLDER_VARIABLE, RUN_VARIABLE
from lagom_overlap.online.events import RANK_VARIABLE, rank_of
from lagom_overlap.record import check_own_folder, make_folder, read_regular

_RING_VARIABLES: Final = ("LAGOM_RECORD", "LAGOM_PROFILE")
_MAX_BYTES: Final = 1 << 16
"""Chosen: a claim has some hundred bytes."""
_MAX_JOBS: Final = 1000
"""Jobs of a run that get files. Bounds a loop over claims; chosen far above any real script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks of a job meet; unknown numbers are None."""

    place: str
    rank: int | None
    world_size: int | None


class _Claim(msgspec.Struct, frozen=True, kw_only=True):
    """What `.job.N` says; `run` is the launcher that the job was started below, `agent` torchrun's folder of logs."""

    place: str
    world_size: int | None
    run: str
    agent: str
    host: str
    process_id: int

    def is_same_job(self, other: "_Claim") -> bool:
        """Whether the other is a rank of this job, or of its restart."""
        return self.place == other.place and not (
            self.run == other.run and self.agent != other.agent and self._is_gone(other.host)
        )

    def is_left(self, other: "_Claim") -> bool:
        """Whether an earlier run left it in a folder that several tasks share, as a requeued job finds it."""
        return self.run != other.run and self._is_gone(other.host)

    def _is_gone(self, host: str) -> bool:
        """Whether the process ended that put it there, as far as another of that host can tell."""
        return self.host == host and not Path(f"/proc/{self.process_id}").exists()


def meeting_of(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Meeting:
    """What the arguments of `init_process_group` and the launcher's variables say, as PyTorch reads them."""
    store, url = arguments.get("store"), urlsplit(str(arguments.get("init_method") or "env://"))
    query = parse_qs(url.query)
    if store is not None:
        while (inner := getattr(store, "underlying_store", None)) is not None:  # of a store under a prefix
            store = inner
        place = str(getattr(store, "port", None) or getattr(store, "path", None) or f"process {os.getpid()}")
    elif url.scheme == "env":
        place = environment.get("MASTER_PORT", "")
    else:
        place = str(url.port) if url.scheme == "tcp" else url.path
    is_told = store is None and url.scheme == "env"
    return Meeting(
        place=place,
        rank=_number(arguments.get("rank"), query.get("rank"), environment.get("RANK") if is_told else None),
        world_size=_number(
            arguments.get("world_size"), query.get("world_size"), environment.get("WORLD_SIZE") if is_told else None
        ),
    )


def _number(*values: object) -> int | None:
    """The first value that is a number from 0 on; PyTorch uses -1 for "not given"."""
    for value in values:
        text = str(value[0] if isinstance(value, list) else value)
        if text.isdecimal():
            return int(text)
    return None


def note_rank(rank: int | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets `RANK_VARIABLE`, which the plug-in and `rank_of` read, if the launcher's variables do not give the rank."""
    if rank is not None and rank_of(environment) != rank:
        environment[RANK_VARIABLE] = f"{os.getpid()}:{rank}"  # a child that inherits it is another process


def settle(meeting: Meeting, environment: MutableMapping[str, str] = os.environ) -> None:
    """Takes this process's rank and files: where the run's folder is another job's, all of ours go into one below it.

    Raises:
        OutputError: if there is no such folder to be had; the environment then names no file of the other job's.
    """
    note_rank(meeting.rank, environment)
    if FOLDER_VARIABLE not in environment:
        return  # no run of `lagom run`
    rings = {name: Path(environment[name]) for name in _RING_VARIABLES if environment.get(name)}
    try:
        folder, below = _own_folder(meeting, environment)
        for path in {folder, *(ring.parent for ring in rings.values())} if below else ():
            _make(path / below)
    except BaseException:
        environment.update(dict.fromkeys((*rings, "LAGOM_TABLE"), ""))
        raise
    environment[FOLDER_VARIABLE] = str(folder / below)
    environment.update({name: str(ring.parent / below / ring.name) for name, ring in rings.items()})


def _own_folder(meeting: Meeting, environment: MutableMapping[str, str]) -> tuple[Path, str]:
    """The run's folder, and the folder below it that is this job's: none, if it is the first."""
    folder = Path(environment[FOLDER_VARIABLE])
    number, first_world = _claimed(folder, meeting, environment)
    if not number:
        return folder, ""
    environment[FIRST_WORLD_VARIABLE] = "" if first_world is None else str(first_world)
    return folder, f"nested-{number}"


def _make(path: Path) -> None:
    try:
        make_folder(path)
    except OutputError:
        if not os.path.lexists(path):
            raise
    check_own_folder(path)  # another rank of this job has made it


def _claimed(folder: Path, meeting: Meeting, environment: Mapping[str, str]) -> tuple[int, int | None]:
    """Which of the run's jobs this is, and how many ranks the first has; the first, where nothing can be written."""
    mine = _Claim(
        place=meeting.place,
        world_size=meeting.world_size,
        run=environment.get(RUN_VARIABLE, ""),
        agent=_agent(environment),
        host=socket.gethostname(),
        process_id=os.getpid(),
    )
    first_world = None
    for number in count():
        path = folder / f".job.{number}"
        try:
            claim = _placed(path, mine)
            if claim.is_left(mine):
                path.unlink(missing_ok=True)
                claim = _placed(path, mine)
        except OSError:
            if not number:
                return 0, None  # files of ours cannot be written there either, which they say
            raise OutputError(f"{str(path)!r} is no file of ours") from None
        if not number:
            first_world = claim.world_size
        if claim.is_same_job(mine):
            return number, first_world
        if number >= _MAX_JOBS:
            raise OutputError(f"more than {_MAX_JOBS} jobs were started below one lagom run")
    raise AssertionError


def _placed(path: Path, mine: _Claim) -> _Claim:
    """The claim that is there, which is mine if there was none."""
    handle, aside = tempfile.mkstemp(prefix=".lagom-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(mine))
        os.link(aside, path)
    except FileExistsError:
        pass
    finally:
        Path(aside).unlink(missing_ok=True)
    try:
        return msgspec.json.decode(read_regular(path, _MAX_BYTES, is_own=True), type=_Claim)
    except msgspec.MsgspecError as error:
        raise OSError(str(error)) from None


def _agent(environment: Mapping[str, str]) -> str:
    """A name that torchrun's processes share: `FOLDER/attempt_N/RANK/error.json` names the folder of one torchrun."""
    file = environment.get("TORCHELASTIC_ERROR_FILE", "")
    return os.path.dirname(os.path.dirname(os.path.dirname(file)))  # noqa: PTH120 - "" stays ""
