"""`lagom export RUN`: what a run found, written in the forms that a job, NCCL or a framework reads."""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from lagom_overlap.collective import (
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigTable,
    LaunchConfig,
    one_launch,
)
from lagom_overlap.collective.sites import NO_CYCLES, Cycles, cycles_of, keys_of
from lagom_overlap.errors import BundleError, JobError, LagomError
from lagom_overlap.export.deployment import Deployment, Exported, site_words, within_maps
from lagom_overlap.export.env_file import env_file
from lagom_overlap.export.megatron_yaml import check_groups, megatron_yaml
from lagom_overlap.export.ncclx import ncclx_csv, ncclx_json
from lagom_overlap.export.nvidia_csv import nvidia_csv
from lagom_overlap.export.plugin_table import plugin_table
from lagom_overlap.hardware import Cluster
from lagom_overlap.interrupts import held_back
from lagom_overlap.jobfile.job import RANK_BACKENDS, Job
from lagom_overlap.jobfile.online_settings import online_settings, read_online_deployment
from lagom_overlap.jobfile.run_folder import RECORD, RunFolder, job_command
from lagom_overlap.nccl_plugin.capability import BoxMaps
from lagom_overlap.nccl_plugin.loaded import installed_nccl
from lagom_overlap.nccl_plugin.size_ranges import CallSite
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator
from lagom_overlap.record import make_folder, read_regular, write_private
from lagom_overlap.results.conclusion import ELSEWHERE, line_under
from lagom_overlap.results.export import ExportedFile, ExportResult
from lagom_overlap.toml_tables import parse_toml
from lagom_overlap.tuners.problem import GroupProblem
from lagom_overlap.verbs.from_trace import TracedCall, TracedCycle, TracedSite
from lagom_overlap.verbs.given import given
from lagom_overlap.verbs.own_trace import is_own_run, read_own_run
from lagom_overlap.workload import CommOp

MAX_CONFIGS_BYTES: Final = 16 << 20
"""Chosen, far above the settings of any job that is known."""
_MAX_TIMELINE_BYTES: Final = 1 << 30
"""Chosen, far above any timeline that is written."""
"""Backends whose channels and chunks are their own engine's, not NCCL's."""


class Format(StrEnum):
    """The forms that a run can be written in."""

    PLUGIN = "plugin"
    NVIDIA_CSV = "nvidia_csv"
    NCCLX_CSV = "ncclx_csv"
    NCCLX_JSON = "ncclx_json"
    ENV = "env"
    MEGATRON_YAML = "megatron_yaml"
    PERFETTO = "perfetto"


_USES: Final = {
    Format.PLUGIN: "lagom run --config {path} -- {command}",
    Format.NVIDIA_CSV: "NCCL_TUNER_CONFIG_FILE={path} NCCL_TUNER_PLUGIN=libnccl-tuner-example.so {command}    "
    "# NVIDIA's example tuner, or RCCL's",
    Format.NCCLX_CSV: "NCCLX_TUNER_CONFIG_FILE=$(realpath {path}) {command}",
    Format.NCCLX_JSON: "NCCLX_TUNER_CONFIG_FILE=$(realpath {path}) {command}    # a build of NCCLX with folly",
    Format.ENV: "env $(grep -v '^#' {path}) {command}",
    Format.MEGATRON_YAML: "{command} --nccl-communicator-config-path {path}",
    Format.PERFETTO: "python3 -m webbrowser https://ui.perfetto.dev    # and open {path} there",
}
"""How each file is given to a job; leaving it out again is how it is undone."""


class _Configs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`configs.toml`."""

    adopted: bool
    groups: dict[str, dict[str, dict[str, str | int]]]
    launches: dict[str, LaunchConfig] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """A run folder and the forms wanted; `out` None: into the run folder. `groups` maps communicators for Megatron."""

    run: Path
    formats: tuple[Format, ...]
    out: Path | None = None
    groups: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class ExportSource:
    """What is deployed of a run, and its caveats."""

    deployment: Deployment
    notes: tuple[str, ...]


def run_export(request: ExportRequest) -> ExportResult:
    """Writes the files; one that is there from an earlier export is replaced.

    Raises:
        LagomError: if the run cannot be read, a form cannot hold it at all, or a file cannot be written.
    """
    check_groups(request.groups)
    read = read_deployment(request.run)
    deployment, refused = within_maps(read.deployment, BoxMaps.here(installed_nccl()))
    here = request.run if request.run.is_dir() else request.run.parent
    out = here if request.out is None else request.out
    exports = [(wanted, _export(wanted, deployment, request)) for wanted in dict.fromkeys(request.formats)]
    for wanted, exported in exports:
        if exported.is_empty and len(deployment.table):
            raise JobError(
                f"nothing that {str(request.run)!r} set fits {wanted}: {'; '.join(exported.not_carried)}. "
                f"All of it fits: lagom export {shlex.quote(str(request.run))} --format {Format.PLUGIN}"
            )
    if not out.is_dir():
        make_folder(out)
    files = []
    with held_back():
        for _, exported in exports:
            write_private(out / exported.name, exported.content)
    for wanted, exported in exports:
        notes = [*exported.not_carried, *((*read.notes, *refused) if wanted is not Format.PERFETTO else ())]
        launch = deployment.launch
        if not launch.is_untouched and wanted not in (Format.ENV, Format.PERFETTO):
            notes.append(f"the computation's side ({launch}): export the form env too, or set it in the job")
        path = out / exported.name
        use = line_under(
            _launcher(request.run) if wanted is Format.PLUGIN else "",
            _USES[wanted].format(path=shlex.quote(str(path)), command=job_command(request.run)),
        )
        files.append(ExportedFile(format=wanted, path=path, use=use, not_carried=tuple(notes)))
    return ExportResult(
        run=request.run,
        num_rows=len(deployment.table),
        files=tuple(files),
    )


def _launcher(run: Path) -> str:
    """What emulates the GPUs of the run, for a shell; empty where they are real, or nothing says."""
    if not (run / RECORD).is_file():
        return ""
    record = RunFolder.read(run).record
    predicted = record.result.get("predicted") if isinstance(record.result, dict) else None
    is_traced = isinstance(predicted, dict) and predicted.get("is_emulated") is True
    return record.machine.get("emulated_by", ELSEWHERE if is_traced else "")


def _export(wanted: Format, deployment: Deployment, request: ExportRequest) -> Exported:
    match wanted:
        case Format.PLUGIN:
            return plugin_table(deployment)
        case Format.NVIDIA_CSV:
            return nvidia_csv(deployment)
        case Format.NCCLX_CSV:
            return ncclx_csv(deployment)
        case Format.NCCLX_JSON:
            return ncclx_json(deployment)
        case Format.ENV:
            return env_file(deployment)
        case Format.MEGATRON_YAML:
            return megatron_yaml(deployment, request.groups)
        case Format.PERFETTO:
            return _timeline(request.run)


def _timeline(run: Path) -> Exported:
    path = run / "timeline.json"
    try:
        content = read_regular(path, _MAX_TIMELINE_BYTES)
        msgspec.json.decode(content, type=dict[str, msgspec.Raw])["traceEvents"]
    except OSError as error:
        raise BundleError(f"timeline {str(path)!r} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, KeyError):
        raise BundleError(f"timeline {str(path)!r} is no Chrome trace") from None
    return Exported(
        name="perfetto.json", content=content, not_carried=("a timeline shows times; it sets nothing in a job",)
    )


def read_deployment(run: Path) -> ExportSource:
    """What a run folder of `lagom tune` deploys, every call site that its `configs.toml` sets; or saved settings.

    Saved settings are a file, or the folder of the `lagom run --online` that left it.

    Raises:
        JobError: if it is neither, or is of an engine whose knobs are not NCCL's.
        BundleError: if a file of it is damaged.
    """
    if (saved := online_settings(run)) is not None:
        return ExportSource(read_online_deployment(saved)[0], ())
    if not run.is_dir():
        lacks = "is neither a run folder nor settings of online tuning" if run.exists() else "does not exist"
        raise JobError(f"{str(run)!r} {lacks}")
    given(run)  # what another verb's run leaves to set, it says
    if not is_own_run(run):
        raise JobError(f"{str(run)!r} is no run folder of lagom tune: run.json or measurements.jsonl is missing")
    if (predicted := RunFolder.read(run).record.from_trace) is not None:
        return _of_trace(run, predicted)
    own = read_own_run(run)
    foreign = next((name for name in (own.job.spec.job.backend, own.recorded_on) if name in RANK_BACKENDS), None)
    if foreign is not None:
        raise JobError(f"{str(run)!r} was tuned on {foreign}: its settings mean nothing to NCCL")
    configs = _configs(run / "configs.toml")
    notes = [] if configs.adopted else ["the verdict did not adopt the configuration: nothing is set"]
    cluster = own.job.cluster
    rows, calls, cycles, unclear = _rows(own.job, own.problems, configs)
    ordered = tuple(dict.fromkeys(_communicator(op) for problem in own.problems for op in problem.group.comms))
    notes += [
        f"{site_words(site)}: its calls differ, and the job does not tell their order; left out" for site in unclear
    ]
    if rows:
        notes += _order_notes(ordered)
    deployment = Deployment(
        table=ConfigTable(rows, cycles=cycles),
        communicators=tuple(ProcessCommunicator(name, _num_nodes(cluster, name)) for name in ordered),
        calls_per_step=calls,
        launch=one_launch(configs.launches.values()),
        changed=_changed(own.problems, configs),
    )
    return ExportSource(deployment, tuple(notes))


class _Traced(msgspec.Struct, frozen=True):
    """What of a prediction's record says where its settings belong."""

    calls: tuple[TracedCall, ...]
    sites: tuple[TracedSite, ...]
    cycles: tuple[TracedCycle, ...] = ()

    def communicators(self) -> dict[str, CommunicatorId]:
        """The trace's communicators by name; those of equal ranks in any order, as all get the same."""
        return {
            f"{call.communicator}/{call.num_ranks}": CommunicatorId(
                description=call.communicator, ranks=tuple(range(call.num_ranks))
            )
            for call in self.calls
        }


def _of_trace(run: Path, record: object) -> ExportSource:
    """What was predicted from a trace, by what the plug-in can tell at run time: ranks, kind, bytes, place in the step.

    A collective without places stands for all calls of its kind and size; where another communicator has as many ranks,
    for those of all of them, because a trace does not tell the order in which communicators were created.

    Raises:
        BundleError: if the record or configs.toml is damaged.
        JobError: if it is a prediction from an earlier run of ours, which is exported itself.
    """
    try:
        traced = msgspec.convert(record, _Traced)
    except msgspec.ValidationError:
        raise JobError(f"{str(run)!r} was predicted from a run of lagom tune: export that run") from None
    configs = _configs(run / "configs.toml")
    notes = [] if configs.adopted else ["no gain beyond the model's own error was predicted: nothing is set"]
    named = traced.communicators()
    wanted: dict[tuple[int, CollectiveKind, int], dict[tuple[int, ...], set[CommConfig]]] = defaultdict(dict)
    for site in traced.sites:
        key = site.call.num_ranks, site.call.kind, site.call.num_bytes
        wanted[key].setdefault(site.places, set()).add(_config(configs, site.group, site.comm))
    rows: dict[ConfigKey, CommConfig] = {}
    calls: dict[CallSite, int] = {}
    cycles = {
        named[f"{cycle.communicator}/{cycle.num_ranks}"]: keys_of(
            named[f"{cycle.communicator}/{cycle.num_ranks}"], cycle.calls
        )
        for cycle in traced.cycles
        if f"{cycle.communicator}/{cycle.num_ranks}" in named
    }
    for call in traced.calls:
        where = (named[f"{call.communicator}/{call.num_ranks}"], call.kind, call.num_bytes)
        # Without a place a row holds for whichever call: of a followed communicator, at all its places in the cycle.
        every = [key.occurrence for key in cycles.get(where[0], ()) if (key.kind, key.num_bytes) == where[1:]] or [0]
        calls[where] = len(every)
        for places, settings in wanted.get((call.num_ranks, call.kind, call.num_bytes), {}).items():
            # Where a shared setting is what a group ran already, configs.toml leaves that group untouched.
            for setting in {setting for setting in settings if not setting.is_untouched}:
                rows |= {_key(where, place): setting for place in (places or every)}
                notes.append(f"{site_words(where)}: {_which(places, len(every))}")
    alike = Counter(len(name.ranks) for name in named.values())
    shared = [num_ranks for num_ranks in {len(key.communicator.ranks) for key in rows} if alike[num_ranks] > 1]
    notes += [
        f"the settings of {num_ranks} ranks go to the first {alike[num_ranks]} communicators of as many ranks that the "
        "job creates: the trace does not tell which is which"
        for num_ranks in sorted(shared)
    ]
    deployment = Deployment(
        table=ConfigTable(rows, cycles=cycles),
        communicators=tuple(ProcessCommunicator(name) for name in named.values()),
        calls_per_step=calls,
    )
    return ExportSource(deployment, tuple(notes))


def _key(site: CallSite, occurrence: int) -> ConfigKey:
    communicator, kind, num_bytes = site
    return ConfigKey(communicator=communicator, kind=kind, num_bytes=num_bytes, occurrence=occurrence)


def _which(places: tuple[int, ...], num_calls: int) -> str:
    """Which calls of a step a setting is for."""
    if not places:
        return "all calls of a step share one setting"
    if len(places) == num_calls:
        return f"each of its {num_calls} calls of a step has the setting" if num_calls > 1 else "its call of a step"
    numbers = ", ".join(str(place + 1) for place in places)
    return f"call{'s' if len(places) > 1 else ''} {numbers} of {num_calls} in a step"


def _order_notes(ordered: Iterable[CommunicatorId]) -> Iterator[str]:
    """Which communicators of a job the settings are for: NCCL knows no names, so the order of creation has to tell."""
    names: dict[int, list[str]] = defaultdict(list)
    for name in ordered:
        names[len(name.ranks)].append(name.description)
    for num_ranks, alike in names.items():
        if len(alike) == 1:
            yield f"the settings of {alike[0]!r} go to the first communicator of {num_ranks} ranks that the job creates"
        else:
            yield (
                f"the job's communicators of {num_ranks} ranks are told apart by the order in which it creates them: "
                f"it has to be {', '.join(alike)}"
            )


def _num_nodes(cluster: Cluster | None, name: CommunicatorId) -> int | None:
    return None if cluster is None else cluster.num_nodes_of(len(name.ranks))


def _changed(problems: Iterable[GroupProblem], configs: _Configs) -> frozenset[str] | None:
    """The knobs in which settings differ from the defaults that they were found against; None where those say none."""
    knobs = [field.name for field in fields(CommConfig)]
    changed: set[str] = set()
    for problem in problems:
        for op, default in zip(problem.group.comms, problem.default, strict=True):
            setting = _config(configs, problem.group.name, op.name)
            if default.is_untouched and not setting.is_untouched:
                return None
            changed |= {knob for knob in knobs if getattr(setting, knob) not in (None, getattr(default, knob))}
    return frozenset(changed)


def _communicator(op: CommOp) -> CommunicatorId:
    return CommunicatorId(description=op.communicator, ranks=tuple(range(op.collective.num_ranks)))


def _site(op: CommOp) -> CallSite:
    return _communicator(op), op.collective.kind, op.collective.num_bytes


def _rows(
    job: Job, problems: tuple[GroupProblem, ...], configs: _Configs
) -> tuple[dict[ConfigKey, CommConfig], dict[CallSite, int], Cycles, list[CallSite]]:
    """The rows that set something, the calls per step and in their order, and the sites that cannot be told apart.

    A job that gives its groups by their shapes does not say how often and in what order a site is called: one row then
    holds for every call, if all of the site's collectives share a configuration.
    """
    iteration = job.issued
    sites: dict[CallSite, dict[int, CommConfig]] = defaultdict(dict)
    every: dict[CallSite, set[CommConfig]] = defaultdict(set)
    for problem in problems:
        for op, occurrences in zip(problem.group.comms, problem.group.occurrences, strict=True):
            config = _config(configs, problem.group.name, op.name)
            every[_site(op)].add(config)
            sites[_site(op)] |= dict.fromkeys(occurrences, config)
    if iteration is None:
        unclear = [site for site, configs_there in every.items() if len(configs_there) > 1]
        sites = {site: {0: configs_there.pop()} for site, configs_there in every.items() if len(configs_there) == 1}
        return _keyed(sites), dict.fromkeys(sites, 1), NO_CYCLES, unclear
    calls = Counter[CallSite]()
    keys = []
    for communicator, kind, num_bytes in map(_site, iteration.comms):
        occurrence = calls[communicator, kind, num_bytes]
        keys.append(ConfigKey(communicator=communicator, kind=kind, num_bytes=num_bytes, occurrence=occurrence))
        calls[communicator, kind, num_bytes] += 1
    return _keyed(sites), dict(calls), cycles_of(keys), []


def _keyed(sites: Mapping[CallSite, Mapping[int, CommConfig]]) -> dict[ConfigKey, CommConfig]:
    return {
        ConfigKey(communicator=communicator, kind=kind, num_bytes=num_bytes, occurrence=occurrence): config
        for (communicator, kind, num_bytes), configs in sites.items()
        for occurrence, config in sorted(configs.items())
        if not config.is_untouched
    }


def _config(configs: _Configs, group: str, comm: str) -> CommConfig:
    try:
        return msgspec.convert(configs.groups[group][comm], CommConfig)
    except KeyError:
        raise BundleError(f"configs.toml holds no collective {comm!r} of group {group!r}") from None
    except (msgspec.ValidationError, LagomError) as error:
        raise BundleError(f"configs.toml: {comm!r} of group {group!r}: {error}") from None


def _configs(path: Path) -> _Configs:
    try:
        raw = parse_toml(read_regular(path, MAX_CONFIGS_BYTES))
        return msgspec.convert(raw, _Configs)
    except OSError as error:
        raise BundleError(f"{str(path)!r} cannot be read: {error.strerror}") from None
    except (ValueError, msgspec.ValidationError, LagomError) as error:
        raise BundleError(f"{str(path)!r} is damaged: {error}") from None
