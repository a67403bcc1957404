"""`lagom capture`: model code, a named model or a job file becomes a capture file; and a job's capture, read.

A script is the user's own Python and is run as it stands. Modules that need torch are imported only when something is
captured: reading a capture needs none.
"""

import os
import re
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from lagom_overlap.capturing.file import write_capture
from lagom_overlap.errors import JobError, LagomError, MissingDependencyError, OutputError
from lagom_overlap.jobfile.reading import read_job
from lagom_overlap.jobfile.spec import JobSpec
from lagom_overlap.jobfile.step import stated_cluster
from lagom_overlap.results.capture import CaptureResult
from lagom_overlap.workload.issued import IssuedStep
from lagom_overlap.workload.parallel import Dispatcher, ParallelTable
from lagom_overlap.workload.precision import ProductFormat

DEFAULT_RANKS: Final = 8
"""The GPUs of one node."""
DEFAULT_SEQ_LEN: Final = 2048
"""A sequence that is captured in seconds. Chosen, not measured."""

_SCRIPT: Final = re.compile(r"(?P<path>.+\.py):(?P<function>[A-Za-z_]\w*)")
_PARALLEL_KEYS: Final = (
    "replicate",
    "fsdp",
    "tensor",
    "expert",
    "pipeline",
    "axial",
    "sequence",
    "micro_batches",
    "schedule",
    "chunks",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRequest:
    """What is captured, and how; None leaves the default.

    `target` is SCRIPT.py:FUNCTION or the function itself, a job file or the job itself, or a model's name.
    """

    target: str | JobSpec | Callable[[], Any]
    out: Path | None = None
    num_ranks: int | None = None
    rank: int = 0
    parallel: str | None = None
    seq_len: int | None = None
    micro_batch: int | None = None


def run_capture(request: CaptureRequest) -> CaptureResult:
    """Captures a step and writes the file, if one was asked for.

    Raises:
        LagomError: for a user's mistake, a script that fails, or an extra that is not installed.
    """
    out = request.out
    if out is not None and out.exists():
        raise OutputError(f"{str(out)!r} exists already; give another name or remove it")
    if out is not None and not out.parent.is_dir():
        raise OutputError(f"{str(out)!r} cannot be written: its folder does not exist")
    if out is not None and not os.access(out.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{str(out)!r} cannot be written: nor can its folder")
    started = time.perf_counter()
    capture = _captured(request)
    seconds = time.perf_counter() - started
    if out is not None:
        write_capture(out, capture)
    return CaptureResult.of(capture, rank=request.rank, capture_s=seconds, files=() if out is None else (out,))


def _captured(request: CaptureRequest) -> IssuedStep:
    target = request.target
    if isinstance(target, JobSpec):
        return _capture_job(request, target)
    if not isinstance(target, str):
        name = getattr(target, "__name__", "step")
        return _capture_function(request, target, name=name, where=name)
    if script := _SCRIPT.fullmatch(target):
        return _capture_script(request, Path(script["path"]), script["function"])
    if target.endswith(".py"):
        raise JobError(f"{target!r} names no function; give SCRIPT.py:FUNCTION")
    if target.endswith(".toml"):
        return _capture_job(request, read_job(Path(target)))
    if request.num_ranks is not None:
        raise JobError("--ranks goes with a script; a named model has as many ranks as --parallel says")
    options = parse_parallel(request.parallel or f"fsdp={DEFAULT_RANKS}")
    seq_len = DEFAULT_SEQ_LEN if request.seq_len is None else request.seq_len
    micro_batch = 1 if request.micro_batch is None else request.micro_batch
    return _capture_named(target, options, request, seq_len=seq_len, micro_batch=micro_batch)


def parse_parallel(text: str) -> dict[str, int | str]:
    """`"fsdp=8,tensor=2"` as numbers by name.

    Raises:
        JobError: naming the word that is wrong and what is allowed.
    """
    degrees: dict[str, int | str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key == "auto":
            raise JobError(
                "--parallel: auto needs a machine whose times the search compares: give a job file with "
                "[parallel] auto = [8] and [cluster]"
            )
        if key not in _PARALLEL_KEYS or not equals:
            raise JobError(f"--parallel: {part.strip()!r} is no degree; allowed: {', '.join(_PARALLEL_KEYS)}, as key=N")
        if key in degrees:
            raise JobError(f"--parallel: {key} is given twice")
        if key == "schedule":
            degrees[key] = value
        elif re.fullmatch(r"\d{1,6}", value):
            degrees[key] = int(value)
        else:
            raise JobError(f"--parallel: {key} is {value!r}, must be a whole number")
    return degrees


# Named models.


def _torch_part(module: str) -> Any:
    """A module of ours that needs torch, or transformers."""
    try:
        return import_module(f"lagom_overlap.capturing.{module}")
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise MissingDependencyError(f"capture needs the package {error.name!r}: pip install {error.name}") from None


def _capture_named(
    name: str, options: Mapping[str, int | str], request: CaptureRequest, *, seq_len: int, micro_batch: int
) -> IssuedStep:
    for what, value in (("--seq-len", seq_len), ("--micro-batch", micro_batch)):
        if not 1 <= value <= 1 << 20:
            raise JobError(f"{what} is {value}, must be 1 to {1 << 20}")
    named = _torch_part("models.named")
    with _failures_explained(name):
        capture: IssuedStep = named.capture_named(
            name, options, micro_batch=micro_batch, seq_len=seq_len, rank=request.rank
        )
    return capture


def _capture_job(request: CaptureRequest, spec: JobSpec) -> IssuedStep:
    if spec.model is None or spec.model.name is None or spec.parallel is None or spec.model.seq_len is None:
        raise JobError(f"{spec.job.name!r} names no model to capture: give [model] with name and seq_len")
    if spec.cluster is not None and spec.cluster.preset is not None:
        stated_cluster(spec.cluster)  # the machine is not captured, but a name that is none is a mistake
    for flag in ("num_ranks", "parallel", "seq_len", "micro_batch"):
        if getattr(request, flag) is not None:
            raise JobError(
                f"--{flag.removeprefix('num_').replace('_', '-')} does not go with a job file, which says it"
            )
    _check_captured(spec)
    if spec.parallel.auto is not None or spec.parallel.zero_stage in (1, 2):
        if request.rank:
            raise JobError(
                f"rank is {request.rank}: all ranks of a sharding found by search do the same; leave it at 0"
            )
        from lagom_overlap.jobfile.auto_sharding import searched_step, zero_step  # noqa: PLC0415  its cost model reads captures
        from lagom_overlap.jobfile.job import Job  # noqa: PLC0415

        with _failures_explained(spec.model.name):
            return (zero_step if spec.parallel.auto is None else searched_step)(Job(spec))[0]
    options = _options_of(spec.parallel)
    return _capture_named(
        spec.model.name, options, request, seq_len=spec.model.seq_len, micro_batch=spec.parallel.micro_batch
    )


def _check_captured(spec: JobSpec) -> None:
    """Refuses what no capture of a named model has."""
    assert spec.parallel is not None
    assert spec.model is not None
    for key in (
        "recompute_modules",
        "pipeline_layout",
        "whole_experts",
        "fused_experts",
        "cuda_graph",
        "attention_kernel",
    ):
        if getattr(spec.parallel, key):
            raise JobError(f"parallel.{key}: named models are captured without it")
    if spec.parallel.dispatcher is not Dispatcher.ALL_TO_ALL:
        raise JobError(f"parallel.dispatcher is {spec.parallel.dispatcher}: named models are captured with all_to_all")
    for key in ("products", "attention", "head"):
        asked = getattr(spec.precision, key)
        if asked is not ProductFormat.PARAMETER:
            raise JobError(f"precision.{key} is {asked}: named models are captured with parameter")
    if spec.parallel.fsdp is not None and spec.parallel.zero_stage == 2:
        raise JobError("parallel.zero_stage is 2: FSDP2 is captured as it frees parameters after forward, with 3")
    if spec.model.mtp_layers is not None:
        raise JobError("model.mtp_layers: named models are captured as they are published")


def _options_of(parallel: ParallelTable) -> dict[str, int | str]:
    """A job's `[parallel]` as a capture's: `data` with zero_stage 3 is sharded, with 0 or none replicated."""
    if parallel.recompute != "none":
        raise JobError(f"parallel.recompute is {parallel.recompute}: named models are captured without recomputation")
    if parallel.context > 1 or parallel.overlap_tensor:
        raise JobError(
            "parallel.context and overlap_tensor: named models are captured without context parallelism or parts"
        )
    layout = parallel.layout()
    data = layout.data
    shared = {"fsdp": data // layout.replicate, "replicate": layout.replicate}
    options: dict[str, int | str] = {
        **(shared if layout.zero_stage == 3 else {"replicate": data}),
        "tensor": parallel.tensor,
        "expert": parallel.expert,
        "pipeline": parallel.pipeline,
        "sequence": int(parallel.sequence_parallel),
        "chunks": parallel.chunks,
        "schedule": str(parallel.schedule),
    }
    per_step = parallel.micro_batch * data
    total = parallel.global_batch or per_step
    if total % per_step:
        raise JobError(f"parallel.global_batch is {total}, must be a multiple of micro_batch x data = {per_step}")
    options["micro_batches"] = total // per_step
    return options


# Scripts.


def _capture_script(request: CaptureRequest, path: Path, function: str) -> IssuedStep:
    if not path.is_file():
        raise JobError(f"script {str(path)!r} does not exist")
    _check_script(request)
    with _failures_explained(str(path)):
        build = _function_of(path, function)
    return _capture_function(request, build, name=f"{path.stem}-{function}", where=str(path))


def _check_script(request: CaptureRequest) -> int:
    """The number of ranks; refuses, before any of the script runs, what no capture of one has."""
    for flag in ("parallel", "seq_len", "micro_batch"):
        if getattr(request, flag) is not None:
            raise JobError(f"--{flag.replace('_', '-')} goes with a named model; a script says it itself")
    num_ranks = DEFAULT_RANKS if request.num_ranks is None else request.num_ranks
    _torch_part("fake_tensor").check_ranks(num_ranks, request.rank)
    return num_ranks


def _capture_function(request: CaptureRequest, build: Callable[[], Any], *, name: str, where: str) -> IssuedStep:
    num_ranks = _check_script(request)
    return captured_step(build, num_ranks=num_ranks, rank=request.rank, name=name, where=where)


def captured_step(build: Callable[[], Any], *, num_ranks: int, rank: int = 0, name: str, where: str) -> IssuedStep:
    """The step that `build` makes; what fails in it is one line, which names `where`.

    Raises:
        LagomError: for a user's mistake, or code that fails.
    """
    fake_tensor = _torch_part("fake_tensor")
    with _failures_explained(where):
        capture: IssuedStep = fake_tensor.capture_step(build, num_ranks=num_ranks, rank=rank, name=name)
    return capture


def _function_of(path: Path, function: str) -> Callable[..., Any]:
    """The function of that name after running the script; the script's folder is on the path, as with `python`."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        names = runpy.run_path(str(path), run_name="lagom_capture")
    finally:
        sys.path.remove(folder)
    loaded = names.get(function)
    if not callable(loaded):
        raise JobError(f"script {str(path)!r} has no function {function!r}")
    checked: Callable[..., Any] = loaded
    return checked


@contextmanager
def _failures_explained(where: str) -> Iterator[None]:
    """What model code raises becomes one line: where, what, and what a capture cannot do."""
    try:
        yield
    except LagomError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((frame for frame in reversed(frames) if frame.filename.endswith(where)), frames[-1])
        kind = type(error).__name__
        hint = ""
        if kind in ("DynamicOutputShapeException", "DataDependentOutputException", "GuardOnDataDependentSymNode"):
            hint = " (it depends on the values of a tensor; give TrainingStep(read_value=...) to say them)"
        text = str(error).strip().partition("\n")[0][:300]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise JobError(f"{where}: the step failed at {place}: {kind}: {text}{hint}") from error
