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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec

import lagom_overlap
from lagom_overlap.engines.gloo_space import check_collective, check_config
from lagom_overlap.errors import JobError, LagomError, MissingDependencyError, OutputError
from lagom_overlap.export.deployment import Deployment
from lagom_overlap.export.env_file import CARVE_OUT_VARIABLE
from lagom_overlap.export.plugin_table import FILE_NAME, checksum_of, plugin_table
from lagom_overlap.export.run_variables import (
    ADAPTERS_VARIABLE,
    COMMAND_VARIABLE,
    COMPARE_VARIABLE,
    CONFIG_VARIABLE,
    ENGINE_VARIABLE,
    FOLDER_VARIABLE,
    JOB_STEPS_VARIABLE,
    MODE_VARIABLE,
    PAIRS_VARIABLE,
    PLAN_CHECKSUM_VARIABLE,
    PLAN_VARIABLE,
    RUN_VARIABLE,
    TABLE_CHECKSUM_VARIABLE,
    TUNER_VARIABLE,
    WORLD_VARIABLE,
    RunMode,
)
from lagom_overlap.export.saved import GLOO_ROUTE, NCCL_ROUTES, SavedSettings, check_adapters, read_saved
from lagom_overlap.jobfile.conflicts import conflicts, with_conf_files
from lagom_overlap.jobfile.online_settings import read_online_deployment
from lagom_overlap.jobfile.run_folder import RECORD, RUNS_FOLDER, RunFolder, RunKind, RunProcess, RunRecord
from lagom_overlap.nccl_plugin.library import installed_library
from lagom_overlap.nccl_plugin.table_reader import MAX_TABLE_BYTES, decode_table, read_table
from lagom_overlap.nccl_plugin.table_writer import write_table
from lagom_overlap.record import OTHERS_MAY_WRITE, check_own_folder, read_regular, write_private
from lagom_overlap.results.base import encoded
from lagom_overlap.tuners.registry import DEFAULT, OURS, check_tuner_name
from lagom_overlap.verbs.given import Given, GivenKind, given, read_environment

TABLE_VARIABLE: Final = "LAGOM_TABLE"
PLAN_SETTINGS_NAME: Final = "fsdp2.json"
"""What the ranks read of a plan, in the run's folder."""
RECORD_NAME: Final = "record.%r.bin"
PROFILE_NAME: Final = "profile.%r.bin"
_PROFILER_NAME: Final = "libnccl-profiler.so"
"""What NCCL loads as its profiler where none is named."""
QUIET_KINETO: Final = "6"
"""Above every level of the profiler's log: it greets on stderr each time that a step is sampled."""
_MOST_COMMAND: Final = 4096
"""Characters of the job's command that the environment carries; a longer one is left out."""
_SIZE_VARIABLES: Final = ("SLURM_STEP_NUM_TASKS", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""How many tasks a launcher started, each of which runs `lagom run`.

Slurm sets SLURM_NTASKS in a batch script and under salloc, too, where one process runs. A step's number is of srun.
"""


_WITHOUT_PLUGIN: Final = (RunMode.PLANNED, RunMode.HELD)
"""Modes that set nothing of NCCL's: these jobs run without the plug-in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """A command and how to run it.

    `config` is what --config or --prove names, `tuner` what searches online (None: ours), `job_steps` about how many
    steps the job makes (None: unknown), `num_pairs` the most pairs of a proof inside the job (None: as many as online
    tuning's verdict has), `compare` the tuners that are compared with it, `adapters` what brings calls to gloo's route
    (none: what fits the model, or what the settings were saved with), `out` a new folder (None: one below lagom-runs).
    FIXED with a config becomes HELD or PLANNED by what that is; PLANNED without one is untouched.
    """

    command: tuple[str, ...]
    mode: RunMode
    config: Path | None = None
    tuner: str | None = None
    job_steps: int | None = None
    num_pairs: int | None = None
    compare: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    out: Path | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise JobError("no command: give it after --, such as: lagom run --observe -- torchrun train.py")
        if self.mode is RunMode.FIXED and self.config is None:
            raise JobError("give --observe, --online, --prove WHAT or --config RUN: without one there is nothing to do")
        if self.mode is RunMode.OBSERVE and self.config is not None:
            raise JobError("--config has no meaning with --observe, which changes nothing")
        if self.tuner is not None and self.mode is not RunMode.ONLINE:
            raise JobError("--tuner has no meaning without --online: nothing is searched")
        if self.job_steps is not None and self.mode is not RunMode.ONLINE:
            raise JobError("--job-steps has no meaning without --online: nothing is searched")
        if self.compare and self.mode is not RunMode.ONLINE:
            raise JobError("--compare has no meaning without --online: nothing is searched")
        if self.adapters and self.mode is not RunMode.ONLINE:
            raise JobError("--adapters has no meaning without --online: saved settings know theirs")
        check_adapters(self.adapters)
        taken = (DEFAULT, self.tuner or OURS)  # both run anyway
        if len({*taken, *self.compare}) < len(taken) + len(self.compare):
            raise JobError(
                f"--compare names {', '.join(self.compare)}; allowed: different tuners other than "
                f"{' and '.join(taken)}, which run anyway"
            )


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


def check_launch(request: LaunchRequest, environment: Mapping[str, str]) -> None:
    """Refuses a command or a configuration that is not there or is damaged; makes nothing.

    Raises:
        LagomError: if it is refused.
    """
    _program(request.command[0], environment)
    _resolved(request)


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
    request, fixed = _resolved(request)
    shared = _shared_folder(request, environment)
    if shared is None:
        RunFolder.check(request.out)
    library, missing = _library()
    folder = (shared or RunFolder.create(request.out, request.mode).path).resolve()
    prepared, seen = dict(environment), with_conf_files(environment)
    warnings = [f"{conflict.variable}={conflict.value}: {conflict.why}" for conflict in conflicts(seen)]
    warnings += [f"--config: {note}" for note in fixed.notes] if fixed is not None else []
    if request.mode in (RunMode.ONLINE, RunMode.PROVE) and environment.get(TABLE_VARIABLE):
        prepared[TABLE_VARIABLE] = ""
        warnings.append(f"{TABLE_VARIABLE} of the environment is left out: the job begins untouched")
    if library is None:
        warnings.append(missing)
    else:
        files, note = _files_folder(folder)
        warnings += note
        if request.mode not in _WITHOUT_PLUGIN:
            prepared |= _plugin_variables(request.mode, library, files, seen)
        if request.mode in (RunMode.ONLINE, RunMode.PROVE):
            profiler, note = _profiler_variables(library, files, seen)
            prepared |= profiler
            warnings += note
        if fixed is not None and fixed.table is not None:
            write_table(files / FILE_NAME, fixed.table)
            prepared[TABLE_CHECKSUM_VARIABLE] = checksum_of(fixed.table)
    if fixed is not None:
        prepared |= _fixed_variables(fixed, folder)
    prepared |= {
        COMMAND_VARIABLE: _command_json(request.command),
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


def _resolved(request: LaunchRequest) -> tuple[LaunchRequest, "_Fixed | None"]:
    """The request with the file that was given and how the ranks take it, and what is set, where --config sets it."""
    for name in (request.tuner or OURS, *request.compare):
        check_tuner_name(name)
    if request.config is None:
        return request, None
    subject = given(request.config)
    request = replace(request, config=subject.path)
    if request.mode in (RunMode.ONLINE, RunMode.PROVE):
        return request, _Fixed(mode=request.mode, variables=_adapters_of(_online_settings(subject, request.mode)))
    fixed = _fixed(subject)
    return replace(request, mode=fixed.mode), fixed


def _fixed_variables(fixed: "_Fixed", folder: Path) -> dict[str, str]:
    """What tells the ranks what is set, but for the table; a plan's settings are left in the folder."""
    variables = dict(fixed.variables)
    if fixed.sm_carveout is not None:
        variables[CARVE_OUT_VARIABLE] = str(fixed.sm_carveout)
    if fixed.engine is not None:
        variables[ENGINE_VARIABLE] = fixed.engine
    if fixed.world_size is not None:
        variables[WORLD_VARIABLE] = str(fixed.world_size)
    if fixed.plan is not None:
        write_private(folder / PLAN_SETTINGS_NAME, fixed.plan)
        variables[PLAN_VARIABLE] = str(folder / PLAN_SETTINGS_NAME)
        variables[PLAN_CHECKSUM_VARIABLE] = checksum_of(fixed.plan)
    return variables


def _write_record(request: LaunchRequest, folder: Path) -> None:
    """Says what is run; of several tasks that share the folder, once. A job starts without it, too."""
    if not (folder / RECORD).exists():
        asked = {
            "command": _words(request.command),
            "mode": request.mode,
            "config": request.config,
            "tuner": request.tuner,
            "job_steps": request.job_steps,
            "pairs": request.num_pairs,
            "compare": request.compare or None,
            "adapters": request.adapters or None,
        }
        # The command takes this process's place, and has its number.
        record = msgspec.structs.replace(
            RunRecord.now(RunKind.RUN, seed=None, request=asked), process=RunProcess.this()
        )
        RunFolder(folder).write(record, skips_unwritable=True)


def _words(command: Sequence[str]) -> tuple[str, ...]:
    """The words, with something else for bytes that are no text."""
    return tuple(word.encode(errors="replace").decode() for word in command)


def _command_json(command: Sequence[str]) -> str:
    """For the line to type next; without its end where it is long, since an environment has its limits."""
    text = encoded(_words(command)).decode()
    return text if len(text) <= _MOST_COMMAND else "[]"


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
    program = shutil.which(name, path=environment.get("PATH"))
    if program is None:
        raise JobError(f"command {name!r} does not exist or cannot be executed")
    return program


def _library() -> tuple[Path | None, str]:
    try:
        return installed_library(), ""
    except MissingDependencyError as error:
        return None, f"NCCL collectives are out of reach: {error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fixed:
    """What --config sets: the plug-in's table, SMs that the computation leaves free, FSDP2's settings, or variables.

    `mode` is how the ranks take it, `notes` say what it lacks. `engine` is what made the communicators where online
    tuning found the settings, `world_size` how many ranks there were; None: nobody went by the communicators' order, or
    ranks.
    """

    mode: RunMode = RunMode.FIXED
    table: bytes | None = None
    plan: bytes | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    sm_carveout: int | None = None
    notes: tuple[str, ...] = ()
    engine: str | None = None
    world_size: int | None = None

    @classmethod
    def of(cls, deployment: Deployment, notes: tuple[str, ...] = ()) -> "_Fixed":
        exported = plugin_table(deployment)
        return cls(
            table=exported.content,
            sm_carveout=deployment.launch.sm_carveout,
            notes=(*notes, *exported.not_carried),
        )


def _named(request: LaunchRequest) -> dict[str, str]:
    """What the ranks are told of the request by name."""
    named = {} if request.tuner is None else {TUNER_VARIABLE: request.tuner}
    if request.job_steps is not None:
        named[JOB_STEPS_VARIABLE] = str(request.job_steps)
    if request.num_pairs is not None:
        named[PAIRS_VARIABLE] = str(request.num_pairs)
    if request.compare:
        named[COMPARE_VARIABLE] = ",".join(request.compare)
    if request.adapters:
        named[ADAPTERS_VARIABLE] = ",".join(request.adapters)
    return named if request.config is None else {**named, CONFIG_VARIABLE: str(request.config.resolve())}


def _online_settings(config: Given, mode: RunMode) -> SavedSettings:
    """Refuses what online tuning did not save, and what it saved without settings where these are to be proven."""
    if config.kind is not GivenKind.SETTINGS:
        raise JobError(f"--online starts from settings that online tuning saved; {str(config.path)!r} is {config.kind}")
    saved = _saved(config.path)
    if mode is RunMode.PROVE and not saved.settings:
        raise JobError(f"{str(config.path)!r} sets nothing: the default was not beaten there, so nothing can be proven")
    return saved


def _adapters_of(saved: SavedSettings) -> dict[str, str]:
    return {ADAPTERS_VARIABLE: ",".join(saved.adapters)} if saved.adapters else {}


def _saved(path: Path) -> SavedSettings:
    """Settings that a job could be given.

    Raises:
        BundleError: if they cannot be read.
        JobError: if their route is unknown, or lacks a knob that they set.
    """
    saved = read_saved(path)
    if saved.route not in (GLOO_ROUTE, *NCCL_ROUTES):
        raise JobError(
            f"{str(path)!r} was saved on the route {saved.route!r}; allowed: {', '.join((GLOO_ROUTE, *NCCL_ROUTES))}"
        )
    if saved.route == GLOO_ROUTE:
        for place, setting in enumerate(saved.settings):
            try:
                check_config(setting.config)
                if not saved.size_octaves:  # a class is named after a size that no call need have
                    check_collective(setting.site.call.collective)
            except LagomError as error:
                raise JobError(f"{str(path)!r}: settings[{place}]: {error}") from None
    return saved


def _fixed(config: Given) -> _Fixed:
    """What is set by something given, and how the ranks take it."""
    path = config.path
    match config.kind:
        case GivenKind.TUNED:
            # Not at the top, here and below: reading runs and plans needs what makes them, and most launches have none.
            from lagom_overlap.verbs.export import read_deployment  # noqa: PLC0415

            source = read_deployment(path)
            return _Fixed.of(source.deployment, source.notes)
        case GivenKind.SETTINGS:
            held = _saved(path)
            if held.route == GLOO_ROUTE:
                return _Fixed(mode=RunMode.HELD, variables=_adapters_of(held))
            deployment, saved = read_online_deployment(path)
            return replace(_Fixed.of(deployment), engine=saved.engine, world_size=saved.world_size)
        case GivenKind.PLAN:
            from lagom_overlap.verbs.plan_file import fsdp2_plan  # noqa: PLC0415

            settings, num_ranks = fsdp2_plan(path)
            return _Fixed(mode=RunMode.PLANNED, plan=encoded(settings), world_size=num_ranks)
        case GivenKind.ENVIRONMENT:
            return _Fixed(mode=RunMode.PLANNED, variables=read_environment(path))
        case GivenKind.TABLE:
            read_table(path)
            data = read_regular(path, MAX_TABLE_BYTES)
            decode_table(data)
            return _Fixed(table=data)


def provable(path: Path) -> GivenKind | None:
    """What a file or folder is to `lagom run --prove`; None where it is refused, or sets nothing."""
    try:
        subject = given(path)
        if subject.kind is GivenKind.SETTINGS:
            _online_settings(subject, RunMode.PROVE)
            return subject.kind
        fixed = _fixed(subject)
    except LagomError:
        return None
    sets_nothing = fixed.table is not None and not decode_table(fixed.table).decisions and fixed.sm_carveout is None
    return None if sets_nothing else subject.kind


def _plugin_variables(mode: RunMode, library: Path, folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What loads the plug-in; `environment` as NCCL has it, its files read, so that no tuner they name is lost."""
    variables = {"NCCL_TUNER_PLUGIN": str(library)}
    before = environment.get("NCCL_TUNER_PLUGIN", "")
    if before and "LAGOM_CHAIN_TUNER" not in environment and Path(before).name != library.name:
        variables["LAGOM_CHAIN_TUNER"] = before
    if mode is RunMode.FIXED:
        variables[TABLE_VARIABLE] = str(folder / FILE_NAME)
    else:
        variables["LAGOM_RECORD"] = str(folder / RECORD_NAME)
    return variables


def _profiler_variables(
    library: Path, folder: Path, environment: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """What loads the profiler plug-in, and what to say where the site's own stays: NCCL runs one."""
    named = environment.get("NCCL_PROFILER_PLUGIN", "")
    candidates = [Path(at) / _PROFILER_NAME for at in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep) if at]
    if named and Path(named).name != library.name:
        return {}, []  # said among the conflicts
    if not named and any(path.is_file() for path in candidates):
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
    is_task = is_one_of_several(environment)
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


def is_one_of_several(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started several tasks, of which this is one."""
    return any(environment.get(name, "").isdecimal() and int(environment[name]) > 1 for name in _SIZE_VARIABLES)


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
