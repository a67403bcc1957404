"""`lagom run -- COMMAND`: the job's own command, in an environment in which NCCL and Python load our plug-in and hooks.

The command takes this process's place (exec): signals, terminal, standard streams and exit code are its own, and
nothing of ours is left between the scheduler and the job. What is prepared before:

    NCCL_TUNER_PLUGIN   liblagom_tuner.so, in front of the tuner that was named there (LAGOM_CHAIN_TUNER)
    LAGOM_TABLE, LAGOM_RUN_TABLE
                        --config's table and its checksum; none for --online, which hands its tables over in memory
    LAGOM_RECORD        per rank what NCCL offered and took (--observe, --online)
    NCCL_PROFILER_PLUGIN, LAGOM_PROFILE
                        the same library, and per rank when collectives ran (--online), unless the site has a profiler
    PYTHONPATH          `online/boot` first, whose sitecustomize waits for a process group and takes itself away
    LAGOM_RUN_*         what the hooks read
    LAGOM_SM_CARVEOUT   SMs that the computation leaves free, where --config says so; the hooks hand it to torch
    KINETO_LOG_LEVEL    the profiler's own log off, unless it is set (--observe, --online)

With LAGOM_DISABLE set the command runs in the environment as it was.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import lagom_overlap
from lagom_overlap.errors import JobError, MissingDependencyError, OutputError
from lagom_overlap.export.deployment import Deployment
from lagom_overlap.export.env_file import CARVE_OUT_VARIABLE
from lagom_overlap.export.plugin_table import CHECKSUM_VARIABLE, FILE_NAME, checksum_of, plugin_table
from lagom_overlap.export.saved import read_saved
from lagom_overlap.jobfile.conflicts import conflicts
from lagom_overlap.jobfile.nccl_conf import with_conf_files
from lagom_overlap.jobfile.online_settings import is_online_settings, read_online_deployment
from lagom_overlap.jobfile.run_folder import RECORD, RUNS_FOLDER, RunFolder, RunKind, RunRecord
from lagom_overlap.nccl_plugin.library import installed_library
from lagom_overlap.nccl_plugin.table_reader import MAX_TABLE_BYTES, decode_table, read_table
from lagom_overlap.nccl_plugin.table_writer import write_table
from lagom_overlap.record import OTHERS_MAY_WRITE, check_own_folder, read_regular
from lagom_overlap.tuners.registry import check_tuner_name

MODE_VARIABLE: Final = "LAGOM_RUN_MODE"
FOLDER_VARIABLE: Final = "LAGOM_RUN_FOLDER"
RUN_VARIABLE: Final = "LAGOM_RUN_ID"
CONFIG_VARIABLE: Final = "LAGOM_RUN_CONFIG"
TUNER_VARIABLE: Final = "LAGOM_RUN_TUNER"
ENGINE_VARIABLE: Final = "LAGOM_RUN_ENGINE"
WORLD_VARIABLE: Final = "LAGOM_RUN_WORLD"
RECORD_NAME: Final = "record.%r.bin"
PROFILE_NAME: Final = "profile.%r.bin"
_PROFILER_NAME: Final = "libnccl-profiler.so"
"""What NCCL loads as its profiler where none is named."""
QUIET_KINETO: Final = "6"
"""Above every level of the profiler's log: it greets on stderr each time that a step is sampled."""
_SIZE_VARIABLES: Final = ("SLURM_NTASKS", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""How many tasks a launcher started, each of which runs `lagom run`."""


class RunMode(StrEnum):
    """What is done with the job: decide by a file, watch only, or tune."""

    FIXED = "fixed"
    OBSERVE = "observe"
    ONLINE = "online"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """A command and how to run it.

    `config` is what --config names, `tuner` what searches online (None: ours), `out` a new folder (None: one below
    lagom-runs).
    """

    command: tuple[str, ...]
    mode: RunMode
    config: Path | None = None
    tuner: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise JobError("no command: give it after --, such as: lagom run --observe -- torchrun train.py")
        if self.mode is RunMode.FIXED and self.config is None:
            raise JobError("give --observe, --online or --config RUN: without one there is nothing to do")
        if self.mode is RunMode.OBSERVE and self.config is not None:
            raise JobError("--config has no meaning with --observe, which changes nothing")
        if self.tuner is not None and self.mode is not RunMode.ONLINE:
            raise JobError("--tuner has no meaning without --online: nothing is searched")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLaunch:
    """A command made ready: its program, the whole environment, and what to tell the user first."""

    program: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path | None
    warnings: tuple[str, ...]


def is_disabled(environment: Mapping[str, str]) -> bool:
    """Whether LAGOM_DISABLE is set to anything but nothing or 0."""
    return environment.get("LAGOM_DISABLE", "") not in ("", "0")


def prepare(request: LaunchRequest, environment: Mapping[str, str]) -> PreparedLaunch:
    """Checks everything, then makes the folder and the table.

    Raises:
        LagomError: if the command, the configuration or the folder is not there; nothing was made then.
    """
    program = _program(request.command[0], environment)
    if is_disabled(environment):
        return PreparedLaunch(
            program=program,
            command=request.command,
            environment=environment,
            folder=None,
            warnings=("LAGOM_DISABLE is set: the command runs as if lagom were not there",),
        )
    fixed = _fixed(request.config) if request.config is not None and request.mode is RunMode.FIXED else None
    if request.mode is RunMode.ONLINE:
        _check_online(request)
    shared = _shared_folder(request, environment)
    if shared is None:
        RunFolder.check(request.out)
    library, missing = _library()
    folder = (shared or RunFolder.create(request.out, request.mode).path).resolve()
    prepared, seen = dict(environment), with_conf_files(environment)
    warnings = [f"{conflict.variable}={conflict.value}: {conflict.why}" for conflict in conflicts(seen)]
    warnings += [f"--config: {note}" for note in fixed.notes] if fixed is not None else []
    if library is None:
        warnings.append(missing)
    else:
        files, note = _files_folder(folder)
        warnings += note
        prepared |= _plugin_variables(request.mode, library, files, seen)
        if request.mode is RunMode.ONLINE:
            profiler, note = _profiler_variables(library, files, seen)
            prepared |= profiler
            warnings += note
        if fixed is not None:
            write_table(files / FILE_NAME, fixed.table)
            prepared[CHECKSUM_VARIABLE] = checksum_of(fixed.table)
    if fixed is not None and fixed.sm_carveout is not None:
        prepared[CARVE_OUT_VARIABLE] = str(fixed.sm_carveout)
    if fixed is not None and fixed.engine is not None:
        prepared[ENGINE_VARIABLE] = fixed.engine
    if fixed is not None and fixed.world_size is not None:
        prepared[WORLD_VARIABLE] = str(fixed.world_size)
    prepared |= {
        MODE_VARIABLE: request.mode,
        FOLDER_VARIABLE: str(folder),
        RUN_VARIABLE: secrets.token_hex(8),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(boot_folder()), environment.get("PYTHONPATH", "")))),
    }
    if request.mode is not RunMode.FIXED:
        prepared.setdefault("KINETO_LOG_LEVEL", QUIET_KINETO)
    prepared |= _named(request)
    _write_record(request, folder)
    return PreparedLaunch(
        program=program, command=request.command, environment=prepared, folder=folder, warnings=tuple(warnings)
    )


def _write_record(request: LaunchRequest, folder: Path) -> None:
    """Says what is run; of several tasks that share the folder, once. A job starts without it, too."""
    if not (folder / RECORD).exists():
        words = tuple(word.encode(errors="replace").decode() for word in request.command)  # bytes that are no text
        asked = {"command": words, "mode": request.mode, "config": request.config, "tuner": request.tuner}
        RunFolder(folder).write(RunRecord.now(RunKind.RUN, seed=None, request=asked), skips_unwritable=True)


def replace_process(launch: PreparedLaunch) -> None:
    """Becomes the command. Returns only by raising.

    Raises:
        JobError: if the system refuses to start it.
    """
    try:
        os.execve(launch.program, launch.command, dict(launch.environment))
    except OSError as error:
        raise JobError(f"cannot run {launch.command[0]!r}: {error.strerror}") from None


def _files_folder(folder: Path) -> tuple[Path, list[str]]:
    """Where the plug-in's files go: the run's folder, or one of this machine where files there are not this user's own.

    A file system may give what is made on it to another user (root-squashed NFS, EFS), or let all write it (CIFS). The
    plug-in refuses such a table, and a rank such a record. Nobody removes what is put on this machine: the job takes
    this process's place.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".lagom-") as file:  # mode 0600
            status = os.fstat(file.fileno())
        if status.st_uid == os.geteuid() and not status.st_mode & OTHERS_MAY_WRITE:
            return folder, []
        local = Path(tempfile.mkdtemp(prefix="lagom-run-"))
    except OSError as error:
        raise OutputError(f"cannot create the plug-in's files: {error.strerror}") from error
    whose = "can be written by others" if status.st_uid == os.geteuid() else f"belongs to user {status.st_uid}"
    return local, [f"what is made in {folder} {whose}: the plug-in's files are in {local}"]


def boot_folder() -> Path:
    """The folder whose sitecustomize starts our hooks in the job's Python processes.

    Raises:
        MissingDependencyError: if this installation lacks it.
    """
    for folder in lagom_overlap.__path__:
        path = Path(folder) / "online" / "boot"
        if (path / "sitecustomize.py").is_file():
            return path
    raise MissingDependencyError("online/boot is not in this installation; run: pip install lagom-overlap")


def _program(name: str, environment: Mapping[str, str]) -> str:
    found = shutil.which(name, path=environment.get("PATH"))
    if found is None:
        raise JobError(f"command {name!r} does not exist or cannot be executed")
    return found


def _library() -> tuple[Path | None, str]:
    try:
        return installed_library(), ""
    except MissingDependencyError as error:
        return None, f"NCCL collectives are out of reach: {error}"


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What --config sets: the plug-in's table, and SMs that the computation leaves free; `notes` say what it lacks.

    `engine` is what made the communicators where online tuning found the settings, `world_size` how many ranks there
    were; None: nobody went by the communicators' order, or ranks.
    """

    table: bytes
    sm_carveout: int | None = None
    notes: tuple[str, ...] = ()
    engine: str | None = None
    world_size: int | None = None

    @classmethod
    def of(cls, deployment: Deployment, notes: tuple[str, ...] = ()) -> "_Fixed":
        exported = plugin_table(deployment)
        return cls(exported.content, deployment.launch.sm_carveout, (*notes, *exported.not_carried))


def _named(request: LaunchRequest) -> dict[str, str]:
    """What the ranks are told of the request by name."""
    named = {} if request.tuner is None else {TUNER_VARIABLE: request.tuner}
    return named if request.config is None else {**named, CONFIG_VARIABLE: str(request.config.resolve())}


def _check_online(request: LaunchRequest) -> None:
    if request.tuner is not None:
        check_tuner_name(request.tuner)
    config = request.config
    if config is None:
        return
    if not config.exists():
        raise JobError(f"--config {str(config)!r} does not exist; --online takes settings that online tuning saved")
    if not is_online_settings(config):
        raise JobError(f"--online starts from settings that online tuning saved; {str(config)!r} is none")
    read_saved(config)


def _fixed(config: Path) -> _Fixed:
    """What a run folder, settings that online tuning saved, or a table file sets."""
    if config.is_dir():
        # Not at the top: reading runs needs what tunes them, and most launches have none.
        from lagom_overlap.verbs.export import read_deployment  # noqa: PLC0415

        found = read_deployment(config)
        return _Fixed.of(found.deployment, found.notes)
    if not config.is_file():
        raise JobError(f"--config {str(config)!r} does not exist; give a run folder, saved settings or a plug-in table")
    if is_online_settings(config):
        deployment, saved = read_online_deployment(config)
        return replace(_Fixed.of(deployment), engine=saved.engine, world_size=saved.world_size)
    read_table(config)
    data = read_regular(config, MAX_TABLE_BYTES)
    decode_table(data)
    return _Fixed(data)


def _plugin_variables(mode: RunMode, library: Path, folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What loads the plug-in; `environment` as NCCL has it, its files read, so that no tuner they name is lost."""
    found = {"NCCL_TUNER_PLUGIN": str(library)}
    before = environment.get("NCCL_TUNER_PLUGIN", "")
    if before and "LAGOM_CHAIN_TUNER" not in environment and Path(before).name != library.name:
        found["LAGOM_CHAIN_TUNER"] = before
    if mode is RunMode.FIXED:
        found["LAGOM_TABLE"] = str(folder / FILE_NAME)
    else:
        found["LAGOM_RECORD"] = str(folder / RECORD_NAME)
    if mode is RunMode.ONLINE and environment.get("LAGOM_TABLE"):
        found["LAGOM_TABLE"] = ""  # tuning starts from the untouched job
    return found


def _profiler_variables(
    library: Path, folder: Path, environment: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """What loads the profiler plug-in, and what to say where the site's own stays: NCCL runs one."""
    named = environment.get("NCCL_PROFILER_PLUGIN", "")
    found = [Path(at) / _PROFILER_NAME for at in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if at]
    if named and Path(named).name != library.name:
        return {}, []  # said among the conflicts
    if not named and any(path.is_file() for path in found):
        return {}, [f"{_PROFILER_NAME} of LD_LIBRARY_PATH stays NCCL's profiler: PyTorch's times the steps"]
    profile = environment.get("LAGOM_PROFILE") or str(folder / PROFILE_NAME)
    return {"NCCL_PROFILER_PLUGIN": named or str(library), "LAGOM_PROFILE": profile}, []


def _shared_folder(request: LaunchRequest, environment: Mapping[str, str]) -> Path | None:
    """The folder that all tasks of a launcher use, made by whichever comes first; None for a command started alone.

    What is written there has the rank in its name. A folder that is there is taken for a sibling task's. Machines that
    each start a torchrun of one job share the folder that --out names, and else have one each.

    Raises:
        OutputError: if it cannot be made.
        JobError: if no name for it is known to all tasks.
    """
    is_task = any(environment.get(name, "").isdecimal() and int(environment[name]) > 1 for name in _SIZE_VARIABLES)
    is_shared = request.out is not None and nodes_named(request.command, environment) > 1
    if not is_task and not is_shared:
        return None
    folder = request.out
    if folder is None:
        if "SLURM_JOB_ID" not in environment:
            raise JobError("several tasks were started at once: name a folder for all of them with --out DIR")
        step = environment.get("SLURM_STEP_ID", "0")
        folder = Path(RUNS_FOLDER) / f"{request.mode}-job{environment['SLURM_JOB_ID']}.{step}"
    for path in (folder,) if request.out is not None else (folder.parent, folder):
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            check_own_folder(path)  # a sibling task's, or somebody else's
        except OSError as error:
            raise OutputError(f"cannot create output folder {str(path)!r}: {error.strerror}") from None
    return folder


def nodes_named(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The most machines that torchrun's command asks for (`--nnodes 2`, `--nnodes=1:4`, PET_NNODES), 1 if none."""
    numbers = environment.get("PET_NNODES", "1")
    for word, next_word in zip(command, (*command[1:], ""), strict=True):
        name, _, value = word.partition("=")
        if name == "--nnodes":
            numbers = value or next_word
    most = numbers.rpartition(":")[2]
    return max(1, int(most)) if most.isdecimal() else 1


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """The command among the words that follow the flags: without the `--` in front."""
    return tuple(words[1:] if words and words[0] == "--" else words)
