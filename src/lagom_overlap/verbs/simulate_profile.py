"""`lagom simulate JOB --profile`: measure the job's operators and their chunks here, fit, and write a cluster file.

The file (`machine.toml`) is a preset that `[cluster] preset = "DIR/machine.toml"` takes: this machine as one node, with
an `[operators]` table for the cost model. Its computation is measured; its wires are assumed (`ASSUMED_BYTES_PER_S`),
since nothing was sent.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec
import tomli_w

from lagom_overlap.cost.operators import OperatorConstants
from lagom_overlap.cost.operators.machine_fit import (
    PIECES,
    MachineFit,
    MachineWork,
    ProfiledOperator,
    chunk_of,
    fit_machine,
    held_out,
    machine_gpu,
)
from lagom_overlap.errors import JobError, MissingDependencyError
from lagom_overlap.hardware import Cluster, Gpu, Link, LinkKind
from lagom_overlap.jobfile.job import Job
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.results.base import encoded
from lagom_overlap.results.profile import MeasuredOperator, ProfileResult
from lagom_overlap.units import format_bytes, format_percent
from lagom_overlap.workload import Attention, Gemm, Kernel, MemoryBound

FILE_NAME: Final = "machine.toml"
REPEATS: Final = 7
ASSUMED_BYTES_PER_S: Final = 1e9
"""Nothing was sent: 8 Gbit/s, to be replaced in the file by who knows the wire."""
_ASSUMED_HOP_S: Final = 20e-6
"""Of the order of TCP's latency between two machines."""


def run_profile(job: Job, out: Path, *, repeats: int = REPEATS) -> ProfileResult:
    """Measures, fits, holds out, and writes `machine.toml` and `profile.json` into the new folder `out`.

    Raises:
        JobError: if the job names a model: its operators are meant for a GPU, not for this machine.
        MissingDependencyError: if torch is not installed.
        OutputError: if the folder exists or cannot be written.
    """
    spec, works = job.spec, _works(job)
    try:
        from lagom_overlap.engines.compute import probe_operators  # noqa: PLC0415  torch, only where it is used
    except ModuleNotFoundError as error:
        raise MissingDependencyError(f"--profile needs the package {error.name!r}: pip install torch") from None
    folder = RunFolder.create(out, spec.job.name)
    rows = [(whole, pieces, part) for whole in works for pieces in PIECES if (part := chunk_of(whole, pieces))]
    measured = probe_operators([part for _, _, part in rows], repeats=repeats, seed=spec.tune.seed)
    operators = [
        ProfiledOperator(whole=whole, pieces=pieces, work=part, seconds=measured[part][0])
        for whole, pieces, part in rows
    ]
    fit = fit_machine("this machine", operators)
    errors = held_out("this machine", operators)
    known = [abs(error) for error in errors if error is not None]
    record = RunRecord.now(RunKind.PROFILE, seed=spec.tune.seed, job=spec, request={"repeats": repeats})
    result = ProfileResult(
        job=spec.job.name,
        machine=record.machine,
        versions=record.versions,
        date=record.date,
        repeats=repeats,
        operators=tuple(
            MeasuredOperator(
                work=_words(operator.work),
                pieces=operator.pieces,
                measured_s=operator.seconds,
                spread_s=measured[operator.work][1],
                fit_error=float(residual),
                held_out_error=error,
            )
            for operator, residual, error in zip(operators, fit.errors, errors, strict=True)
        ),
        constants=fit.table,
        unidentified=fit.unidentified,
        fit_mean_abs_error=fit.mean_abs_error,
        held_out_mean_abs_error=sum(known) / len(known) if known else None,
        num_not_held_out=sum(error is None for error in errors),
        files=(out / FILE_NAME, out / "profile.json"),
    )
    folder.write(
        record,
        result,
        {
            FILE_NAME: lambda: _cluster_file(fit, result),
            "profile.json": lambda: msgspec.json.format(encoded(result), indent=2) + b"\n",
        },
    )
    return result


def _words(work: MachineWork) -> str:
    match work:
        case Gemm():
            return f"gemm {work.m} x {work.n} x {work.k}"
        case Attention():
            return f"attention {work.batch} x {work.num_heads} heads, {work.seq_len} x {work.head_dim}"
        case MemoryBound():
            return f"memory {format_bytes(work.num_bytes)}"


def _works(job: Job) -> list[MachineWork]:
    if job.spec.model is not None:
        raise JobError(
            "--profile measures operators of [[group]] on this machine; the job has a [model], which is a GPU's work"
        )
    works: dict[MachineWork, None] = {}
    for group in job.groups:
        for op in group.computations:
            assert not isinstance(op.work, Kernel), "a job file gives works by their shapes"
            works[op.work] = None
    return list(works)


def _stated(constants: Gpu | OperatorConstants) -> dict[str, Any]:  # any TOML value
    """TOML has no null: what is not stated is left out."""
    return {key: value for key, value in asdict(constants).items() if value is not None}


def _cluster_file(fit: MachineFit, result: ProfileResult) -> bytes:
    wire = Link(kind=LinkKind.NETWORK, bytes_per_s=ASSUMED_BYTES_PER_S, hop_s=_ASSUMED_HOP_S, host_fifo=True)
    cluster = Cluster(
        name="this machine",
        gpu=machine_gpu(fit.constants),
        gpus_per_node=8,
        max_gpus_per_node=8,
        num_nodes=1,
        intra=wire,
        inter=wire,
    )
    tables = msgspec.to_builtins({**asdict(cluster), "gpu": _stated(cluster.gpu), "operators": _stated(fit.constants)})
    error = "unknown" if result.held_out_mean_abs_error is None else format_percent(result.held_out_mean_abs_error)
    words = [
        f"Written by {result.tool} {result.version}, {result.date}, job {result.job!r}.",
        f"{result.machine.get('cpu', 'unknown CPU')}, one thread, FP32; {result.repeats} rounds.",
        f"[gpu] and [operators]: fitted, {format_percent(result.fit_mean_abs_error)} mean error, {error} on operators "
        "held out.",
        "[intra] and [inter]: assumed, nothing was sent.",
    ]
    return ("".join(f"# {line}\n" for line in words) + tomli_w.dumps(tables)).encode()
