"""`lagom emulate -- COMMAND`: the command runs as it is, on emulated GPUs and one simulated clock."""

import shlex
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Final

from lagom_emulate.coordinator import Coordinator
from lagom_emulate.launch import (
    JobFolder,
    LaunchedJob,
    emulated_libraries,
    gpu_text,
    host_environments,
    job_environment,
    job_folder,
    refuse_real_gpus,
)
from lagom_emulate.nccl_tables import write_tables
from lagom_emulate.prices import CostModelPrices, Doubt
from lagom_emulate.recorder import MAX_SPANS, Recorder
from lagom_emulate.result import EmulateResult, PricedShare
from lagom_emulate.server import EmulationServer
from lagom_emulate.settings import EmulationSettings, PythonClock
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError
from lagom_overlap.hardware import Cluster
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.jobfile.spec import ClusterTable, EmulateTable, JobSpec
from lagom_overlap.jobfile.step import stated_cluster, step_operators
from lagom_overlap.record import EMULATION_VARIABLE
from lagom_overlap.stderr import write_lines
from lagom_overlap.timeline import Timeline
from lagom_overlap.trace.chrome_writer import chrome_trace
from lagom_overlap.verbs.run import boot_folder, nodes_named

_FILES: Final = ("run.json", "timeline.json")
MAX_STARTED_HOSTS: Final = 64
"""Each is the command and its ranks as processes of this machine."""
MAX_GPUS: Final = 65_535
"""Of all hosts: as many shapes of communicators has a file of NCCL's model (`csrc/nccl_model.c`)."""
_MANY_HOSTS: Final = 256
"""From here on NCCL's model of them takes seconds."""
_DOUBTS: Final = {
    Doubt.FLOOR: (
        "{number} launches of Triton kernels were priced by the bytes of their arguments alone, which is too little "
        "for what they compute (torch.utils.flop_counter.register_flop_formula tells their flops): {names}."
    ),
    Doubt.UNCOUNTED: "{number} launches of operators whose bytes or flops could not be counted: {names}.",
    Doubt.NAME: "{number} launches were priced by kernel name and grid alone, which may be far off: {names}.",
}
_MAX_NAMED, _MAX_NAME = 5, 60
"""Kernels that a note names, and how much of a mangled name."""
_NOTE: Final = (
    "Emulated: no GPU was measured; large kernels compute nothing, so losses are not the job's. "
    "How far: lagom docs accuracy"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulateRequest:
    """A command and what it runs on; `cluster` is a preset's name or file and overrides the job file's.

    With `is_symmetric` only the first host's command is started, and every other host is taken to do the same.
    `num_ranks` are the GPUs of all hosts. `num_hosts` each run the command (None: as many as its `--nnodes` or the job
    file says, or as `num_ranks` fill). `job` is the file that `spec` was read from, as the user named it. With
    `is_quiet` the command's stdout goes to stderr. `libraries` are the emulated ones (None: the installed).
    """

    command: tuple[str, ...]
    cluster: str | None = None
    num_ranks: int | None = None
    num_hosts: int | None = None
    is_symmetric: bool = False
    spec: JobSpec | None = None
    job: Path | None = None
    out: Path | None = None
    is_quiet: bool = False
    libraries: Path | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise JobError(
                "no command: give it after --, such as: lagom emulate --cluster h100_dgx -- torchrun train.py"
            )
        if self.cluster is None and (self.spec is None or self.spec.cluster is None):
            raise JobError("no cluster: give --cluster NAME, or [cluster] in the job file")
        if self.num_ranks is not None and self.num_ranks < 1:
            raise JobError(f"--ranks is {self.num_ranks}, must be at least 1")
        if self.num_hosts is not None and self.num_hosts < 1:
            raise JobError(f"--nodes is {self.num_hosts}, must be at least 1")

    @property
    def launcher(self) -> str:
        """How to emulate the same GPUs again, for a shell: all in front of the command."""
        given = {"--cluster": self.cluster, "--job": self.job, "--ranks": self.num_ranks, "--nodes": self.num_hosts}
        words = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
        return shlex.join(["lagom", "emulate", *words, *(["--symmetric"] if self.is_symmetric else []), "--"])


def run_emulate(request: EmulateRequest, environment: Mapping[str, str]) -> EmulateResult:
    """Runs the command to its end and says what it did.

    Raises:
        LagomError: if the command, the cluster or the emulated libraries are not there, if no process of the command
            used a GPU, or the folder cannot be made.
    """
    refuse_real_gpus()
    if shutil.which(request.command[0], path=environment.get("PATH")) is None:
        raise JobError(f"command {request.command[0]!r} does not exist or cannot be executed")
    libraries = request.libraries or emulated_libraries()
    cluster, model = _model(request, environment)
    num_hosts, gpus_per_host = cluster.num_nodes, _gpus_per_host(request, cluster)
    _check_hosts(cluster, is_symmetric=request.is_symmetric)
    RunFolder.check(request.out)
    settings = settings_of(EmulateTable() if request.spec is None else request.spec.emulate or EmulateTable())
    if request.is_symmetric and num_hosts < 2:
        raise JobError("--symmetric needs several hosts: give --nodes N, or --ranks N beyond those of a host")
    num_started_hosts = 1 if request.is_symmetric else num_hosts
    _check_ranks(settings, num_started_hosts * gpus_per_host, is_symmetric=request.is_symmetric)
    began_s = monotonic()
    with job_folder() as folder:
        for host in range(num_started_hosts):
            folder.gpu(host).write_bytes(gpu_text(cluster, gpus_per_host, host))
        if num_hosts > _MANY_HOSTS:
            write_lines(f"lagom emulate: modelling NCCL on {num_hosts} hosts")
        write_tables(folder.nccl, cluster)
        prepared = job_environment(
            environment,
            folder,
            settings,
            libraries=libraries,
            boot=boot_folder(),
            symmetric_hosts=num_hosts if request.is_symmetric else None,
        ) | {EMULATION_VARIABLE: request.launcher}
        ran = _run(request, folder, host_environments(prepared, folder, num_started_hosts), model, settings)
        refusal = folder.refusal.read_text(encoding="utf-8") if folder.refusal.is_file() else ""
    if refusal and not ran.server.num_processes:
        raise JobError(refusal)
    if not ran.server.num_processes and not ran.exit_code:
        raise JobError(
            "no process of the command used a GPU: it needs PyTorch's CUDA build, and a script that trains on CUDA"
        )
    result = _result(request, ran, cluster, settings, monotonic() - began_s)
    _write(request, result)
    return result


def settings_of(table: EmulateTable) -> EmulationSettings:
    """The job file's section as the emulation takes it."""
    return EmulationSettings(
        launch_s=table.launch_s,
        noise=table.noise,
        seed=table.seed,
        stragglers={row.rank: row.factor for row in table.stragglers},
        slow_links={row.rank: row.factor for row in table.slow_links},
        skew_s={row.rank: row.seconds for row in table.skew},
        python_clock=PythonClock(table.python_clock),
        stall_s=table.stall_s,
    )


@dataclass(frozen=True, slots=True)
class _Ran:
    """What a command left when it had ended."""

    exit_code: int
    coordinator: Coordinator
    recorder: Recorder
    server: EmulationServer


def _model(request: EmulateRequest, environment: Mapping[str, str]) -> tuple[Cluster, ContentionModel]:
    """The hosts as a cluster, and the price that `lagom simulate` has of it."""
    spec = request.spec
    table = _cluster_table(request)
    cluster = stated_cluster(table)
    cluster = replace(cluster, num_nodes=_num_hosts(request, cluster, environment))
    parallel = spec.parallel if spec is not None else None
    operators = step_operators(cluster.gpu, parallel)
    profile = load_profile(spec.cost.profile if spec is not None else "plausible")
    carved = None if spec is None else spec.cost.sm_carveout
    return cluster, ContentionModel(cluster, profile, carved, operators)


def _cluster_table(request: EmulateRequest) -> ClusterTable:
    """What names the hosts: the flag, else the job file."""
    if request.cluster is not None:
        return ClusterTable(preset=request.cluster)
    assert request.spec is not None and request.spec.cluster is not None  # noqa: PT018  checked by the only caller
    return request.spec.cluster


def _num_hosts(request: EmulateRequest, node: Cluster, environment: Mapping[str, str]) -> int:
    """On how many hosts the command is started.

    Raises:
        JobError: if its `--nnodes` is another number than was asked for.
    """
    named = nodes_named(request.command, environment)
    if request.is_symmetric and named > 1:
        raise JobError(
            f"the command is for {named} nodes, but --symmetric starts one host's: leave --nnodes out and give --nodes"
        )
    if request.num_hosts is not None:
        if named not in (1, request.num_hosts):
            raise JobError(f"--nodes is {request.num_hosts}, but the command is for {named} nodes")
        return request.num_hosts
    if named > 1:
        return named
    table = None if request.spec is None or request.cluster is not None else request.spec.cluster
    if table is not None and table.nodes is not None:
        return table.nodes
    return -(-request.num_ranks // node.gpus_per_node) if request.num_ranks is not None else 1


def _check_hosts(cluster: Cluster, *, is_symmetric: bool) -> None:
    """Refuses more hosts than can be modelled, or started.

    Raises:
        JobError: with how many may be.
    """
    most = MAX_GPUS // cluster.gpus_per_node
    if cluster.num_nodes > most:
        raise JobError(
            f"{cluster.num_nodes} hosts of {cluster.gpus_per_node} GPUs ({cluster.name}) are too many: at most {most}"
        )
    if cluster.num_nodes > MAX_STARTED_HOSTS and not is_symmetric:
        raise JobError(
            f"{cluster.num_nodes} hosts are too many to start on this machine: at most {MAX_STARTED_HOSTS}; with "
            "--symmetric only the first is started"
        )


def _gpus_per_host(request: EmulateRequest, cluster: Cluster) -> int:
    """GPUs that each host shows.

    Raises:
        JobError: if the asked for do not spread evenly over the hosts, or a host has fewer.
    """
    num_hosts, num_ranks = cluster.num_nodes, request.num_ranks
    if num_ranks is None:
        return cluster.gpus_per_node
    if num_ranks > cluster.num_gpus or num_ranks % num_hosts:
        raise JobError(
            f"--ranks is {num_ranks}, which {num_hosts} hosts of {cluster.gpus_per_node} GPUs ({cluster.name}) "
            f"cannot share evenly"
        )
    return num_ranks // num_hosts


def _check_ranks(settings: EmulationSettings, num_gpus: int, *, is_symmetric: bool) -> None:
    """Raises JobError where a rank is to be disturbed that has no GPU of its own."""
    for name, ranks in _disturbed(settings).items():
        if max(ranks, default=0) >= num_gpus:
            why = "which --symmetric does not start" if is_symmetric else f"but there are {num_gpus} GPUs, from 0 on"
            raise JobError(f"emulate.{name} names rank {max(ranks)}, {why}")


def _disturbed(settings: EmulationSettings) -> dict[str, Collection[int]]:
    """The ranks that the job file names, by key."""
    return {"stragglers": settings.stragglers, "slow_links": settings.slow_links, "skew": settings.skew_s}


def _run(
    request: EmulateRequest,
    folder: JobFolder,
    environments: Sequence[Mapping[str, str]],
    model: ContentionModel,
    settings: EmulationSettings,
) -> _Ran:
    prices, recorder = CostModelPrices(model), Recorder()
    disturbance = settings if settings.disturbs else None
    coordinator = Coordinator(prices, recorder.add, disturbance)
    job: LaunchedJob | None = None
    with EmulationServer(
        folder.socket,
        coordinator,
        prices,
        recorder,
        is_running=lambda: job is not None and job.is_running(),
        say=lambda line: write_lines(f"lagom emulate: {line}"),
        stall_s=settings.stall_s,
        is_symmetric=request.is_symmetric,
    ) as server:
        job = LaunchedJob(request.command, environments, folder, quiet_stdout=request.is_quiet)
        try:
            server.serve()
            exit_code = job.exit_code
        finally:
            job.end()
    return _Ran(exit_code, coordinator, recorder, server)


def _result(
    request: EmulateRequest, ran: _Ran, cluster: Cluster, settings: EmulationSettings, wall_s: float
) -> EmulateResult:
    recorder, steps = ran.recorder, tuple(ran.recorder.step_s())
    notes = [_NOTE, f"Hosts: {settings.launch_s * 1e6:g} us per launch; Python's time is {settings.python_clock}."]
    if ran.coordinator.num_idle:
        notes.append(f"A host was silent outside of CUDA {ran.coordinator.num_idle} times: its clock stood meanwhile.")
    if ran.coordinator.num_late:
        notes.append(
            f"{ran.coordinator.num_late} operations came later than the simulation was; they began when they came."
        )
    if recorder.has_saved_zeros:
        notes.append("The job saved checkpoints: they hold zeros for what large kernels would have computed.")
    if recorder.num_left_out:
        notes.append(
            f"No timeline and no figures of the last step: of {recorder.num_operations} operations the times of the "
            f"first {MAX_SPANS} were kept."
        )
    notes += [
        _DOUBTS[doubt].format(number=sum(counts.values()), names=_few(counts))
        for doubt, counts in recorder.doubtful.items()
    ]
    num_started = ran.server.num_processes
    num_ranks = num_started * (cluster.num_nodes if request.is_symmetric else 1)
    if request.is_symmetric and num_started:
        notes.append(
            f"Symmetric: {num_ranks - num_started} of {num_ranks} ranks were not started; each is taken to do what the "
            "rank in its place on the first host does."
        )
    named = {rank for ranks in _disturbed(settings).values() for rank in ranks}
    if absent := sorted(rank for rank in named if rank >= num_started):
        ranks = ", ".join(map(str, absent))
        notes.append(f"[emulate] names ranks that the job did not have, and nothing was done to them: {ranks}.")
    last = len(steps) - 1
    has_spans = bool(steps) and not recorder.num_left_out
    timeline = Timeline(()) if recorder.num_left_out else recorder.timeline(last if steps else None)
    shares, counts = recorder.shares, recorder.counts
    return EmulateResult(
        command=request.command,
        exit_code=ran.exit_code,
        cluster=cluster.name,
        num_ranks=num_ranks,
        num_started=num_started,
        num_hosts=cluster.num_nodes,
        num_steps=len(steps),
        step_s=median(steps[1:] or steps) if steps else None,
        steps_s=steps,
        last_step=recorder.figures(last) if has_spans else None,
        virtual_s=ran.coordinator.clock.now_ns * 1e-9,
        wall_s=wall_s,
        memory_bytes=recorder.peak_bytes or None,
        memory_limit_bytes=cluster.gpu.memory_bytes,
        num_operations=recorder.num_operations,
        num_late=ran.coordinator.num_late,
        num_idle=ran.coordinator.num_idle,
        python_clock=settings.python_clock,
        priced=tuple(
            PricedShare(source=source, num_operations=counts[source], time_share=share)
            for source, share in shares.items()
        ),
        refusals=tuple(dict.fromkeys(ran.server.refusals)),
        notes=tuple(notes),
        files=() if request.out is None else tuple(request.out / name for name in _FILES),
        ran=timeline,
    )


def _few(counts: Mapping[str, int]) -> str:
    """The most frequent of what was launched."""
    shown = [f"{name[:_MAX_NAME]} ({number})" for name, number in list(counts.items())[:_MAX_NAMED]]
    more = len(counts) - len(shown)
    return ", ".join(shown) + (f" and {more} others" if more else "")


def _write(request: EmulateRequest, result: EmulateResult) -> None:
    if request.out is None:
        return
    asked = {
        "command": request.command,
        "cluster": request.cluster,
        "num_ranks": request.num_ranks,
        "num_hosts": request.num_hosts,
        "symmetric": request.is_symmetric,
    }
    RunFolder.create(request.out, RunKind.EMULATE).write(
        RunRecord.now(RunKind.EMULATE, seed=None, job=request.spec, request=asked),
        result,
        {"timeline.json": lambda: chrome_trace({Path(result.command[0]).name: result.timeline})},
    )
