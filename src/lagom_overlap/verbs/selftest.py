"""`lagom selftest --nccl`: asks this box's NCCL for every setting in turn, reads back what ran, and saves the map.

The time is spent in this order: two thirds on settings (`engines.nccl.cases`), then the plug-in's overhead and swaps
of tables under traffic, then the GEMM during collectives. Whatever ends it early, what was measured until then is kept.
"""

import csv
import importlib.util
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from time import monotonic
from typing import Final

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost.measured_surface import ContentionSurface, Point, Provenance
from lagom_overlap.engines.nccl.base import Benches, Facts, Reading, TrafficBench
from lagom_overlap.engines.nccl.cases import USUAL, calls, configs
from lagom_overlap.errors import BackendError, MissingDependencyError
from lagom_overlap.interrupts import held_back
from lagom_overlap.jobfile.conflicts import conflicts
from lagom_overlap.jobfile.run_folder import RunFolder, RunKind, RunRecord
from lagom_overlap.nccl_plugin.box import Box, this_box
from lagom_overlap.nccl_plugin.capability import (
    MAX_RANKS_PER_GPU,
    CapabilityMap,
    Knobs,
    MapKey,
    MapRow,
    SettingOutcome,
    judged,
    map_folder,
    with_aliases,
    write_map,
)
from lagom_overlap.nccl_plugin.record_log import Flag
from lagom_overlap.nccl_plugin.space import CHANNELS
from lagom_overlap.results.selftest import Overhead, SelfTestResult, Swaps
from lagom_overlap.units import format_bytes

SETTINGS_SHARE: Final = 2 / 3
"""Of the time: for settings; the rest is for the overhead and the contention."""
NUM_OVERHEAD_PAIRS: Final = 9
"""With and without the plug-in, in turns: an odd number, for a median."""
NUM_SWAPS: Final = 1200
"""Tables swapped under traffic; a race that shows once in a hundred is seen almost surely."""
MINUTE_S: Final = 60.0
"""`--minutes` in seconds."""

Opener = Callable[["SelfTestRequest"], Callable[[Path], Benches]]
"""Checks that there is something to test on, and gives what opens it with a folder for its logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestRequest:
    """What the flags say; `num_gpus` None: all of the box; `library` None: the NCCL that torch has loaded."""

    num_gpus: int | None = None
    ranks_per_gpu: int = 1
    library: Path | None = None
    minutes: float = 10.0
    out: Path | None = None

    def __post_init__(self) -> None:
        if self.num_gpus is not None and self.num_gpus < 1:
            raise BackendError(f"--gpus is {self.num_gpus}, must be at least 1")
        if not 1 <= self.ranks_per_gpu <= MAX_RANKS_PER_GPU:
            raise BackendError(f"--ranks-per-gpu is {self.ranks_per_gpu}, must be from 1 to {MAX_RANKS_PER_GPU}")
        if not 0 < self.minutes <= 24 * 60:
            raise BackendError(f"--minutes is {self.minutes:g}, must be above 0 and at most {24 * 60}")


@dataclass(frozen=True, slots=True)
class _Budget:
    limit_s: float
    spent_s: Callable[[], float]


@dataclass(slots=True)
class _Found:
    """What has been measured so far."""

    rows: list[MapRow] = field(default_factory=list)
    num_called: int = 0
    num_disagreeing: int = 0
    swaps: Swaps | None = None
    overhead: Overhead | None = None
    points: list[Point] = field(default_factory=list)
    stopped: str = ""
    is_interrupted: bool = False
    has_failed: bool = False


def run_selftest(
    request: SelfTestRequest,
    *,
    note: Callable[[str], object] = lambda _: None,
    open_benches: Opener | None = None,
    box: Callable[[], Box | None] = this_box,
    clock: Callable[[], float] = monotonic,
    environment: Mapping[str, str] = os.environ,
) -> SelfTestResult:
    """The whole self-test; `note` is told what is under way.

    Raises:
        BackendError: if there is nothing to test on, or it failed before the first setting.
        MissingDependencyError: without torch.
        OutputError: if the folder or the map cannot be written.
    """
    began = clock()
    in_the_way = conflicts(environment)
    if open_benches is None:
        open_benches = _cuda_benches
        _require_torch()
    opened = open_benches(request)  # refuses before there is a folder
    folder = RunFolder.create(request.out, "selftest-nccl")
    benches = opened(folder.path)
    seen, facts, opened_at = _Found(), benches.collectives.facts, clock()
    num_planned = sum(1 for _ in calls(facts.num_gpus * facts.ranks_per_gpu))
    try:
        _measure(seen, benches, _Budget(request.minutes * MINUTE_S, lambda: clock() - opened_at), note)
    except KeyboardInterrupt:
        seen.stopped, seen.is_interrupted = "interrupted", True
    except (BackendError, RuntimeError) as error:  # a hang, CUDA's own error, no memory: what came before is kept
        if not seen.rows:
            raise
        seen.stopped, seen.has_failed = str(error).partition("\n")[0], True
    notes = [f"{conflict.variable}={conflict.value}: {conflict.why}" for conflict in in_the_way]
    if seen.num_disagreeing:
        notes.append(f"NCCL's log and the kernels' grids disagree about channels in {seen.num_disagreeing} settings")
    with held_back():
        result = SelfTestResult(
            facts=facts,
            rows=with_aliases(seen.rows),
            num_planned_calls=num_planned,
            num_called=seen.num_called,
            swaps=seen.swaps,
            overhead=seen.overhead,
            contention=tuple(seen.points),
            notes=tuple(notes),
            stopped=seen.stopped,
            is_interrupted=seen.is_interrupted,
            has_failed=seen.has_failed,
            wall_s=clock() - began,
            map_path=None,
            files=(),
        )
        keeps_out = "those variables limit what NCCL offers" if in_the_way else ""
        if environment.get("LAGOM_EMULATION_SOCKET"):
            keeps_out = "these GPUs are emulated, what they compute cannot be judged"
        asked = {"gpus": request.num_gpus, "ranks_per_gpu": request.ranks_per_gpu, "minutes": request.minutes}
        record = RunRecord.now(RunKind.SELFTEST, seed=None, request=asked)
        return _written(result, record, folder, box(), cache=map_folder(environment), keeps_out=keeps_out)


def _measure(found: _Found, benches: Benches, budget: _Budget, note: Callable[[str], object]) -> None:
    bench = benches.collectives
    for depth, kind, num_bytes in calls(bench.facts.num_gpus * bench.facts.ranks_per_gpu):
        if budget.spent_s() > SETTINGS_SHARE * budget.limit_s:
            found.stopped = "its time for settings was spent"
            break
        note(f"{kind} of {format_bytes(num_bytes)}; {len(found.rows)} settings are done")
        offered = bench.offered(kind, num_bytes)
        for reading in bench.measure(kind, num_bytes, configs(depth, offered, bench.facts.tuner_version)):
            found.rows.append(row_of(kind, num_bytes, reading))
            found.num_disagreeing += _disagrees(kind, reading)
        found.num_called += 1
    note("the plug-in's overhead")
    found.overhead = _overhead(benches.traffic)
    note("swapping tables under traffic")
    found.swaps = Swaps(NUM_SWAPS, benches.traffic.num_wrong(NUM_SWAPS))
    for num_channels, kind in product(CHANNELS, USUAL):
        if budget.spent_s() > budget.limit_s:
            found.stopped = found.stopped or "its time was spent before the contention was done"
            break
        note(f"a GEMM during {kind} on {num_channels} channels")
        found.points.append(benches.contention.point(kind, num_channels))


def row_of(kind: CollectiveKind, num_bytes: int, reading: Reading) -> MapRow:
    """One setting as asked and as it ran."""
    asked, ran = Knobs.of(reading.config), ran_of(kind, reading)
    return MapRow(
        kind=kind,
        num_bytes=num_bytes,
        asked=asked,
        ran=ran,
        outcome=judged(asked, ran, is_right=reading.is_right),
        time_s=reading.time_s if reading.time_s > 0 else None,
    )


def ran_of(kind: CollectiveKind, reading: Reading) -> Knobs:
    """What ran: implementation and clamped chunk by the log, channels by the kernels, other chunks by the record.

    Where the log says nothing of an implementation, a decision that the plug-in applied is taken to have run.
    """
    call = next((call for call in reversed(reading.log.calls) if call.kind is kind), None)
    chunks = [chunk.chunk_bytes for chunk in reading.record.chunks if chunk.kind is kind]
    clamps = [clamp.kept_bytes for clamp in reading.log.clamps if clamp.kind is kind]
    applied = [d for d in reading.record.decisions if d.kind is kind and Flag.APPLIED in d.flags]
    channels = min(reading.grids) if reading.grids else call.num_channels if call else None
    algorithm = call.algorithm if call else applied[-1].algorithm if applied else None
    protocol = call.protocol if call else applied[-1].protocol if applied else None
    chunk = min(clamps) if clamps else max(chunks, default=None)
    return Knobs(algorithm, protocol, channels, chunk)


def _disagrees(kind: CollectiveKind, reading: Reading) -> bool:
    """Whether the log's channels are not the kernels' blocks, where both were told."""
    logged = {call.num_channels for call in reading.log.calls if call.kind is kind}
    return bool(logged and reading.grids) and logged != set(reading.grids)


def _overhead(bench: TrafficBench) -> Overhead:
    """On and off in alternation, so that a drift of the host falls on both."""
    bench.host_s(is_on=True), bench.host_s(is_on=False)
    pairs = [(bench.host_s(is_on=True), bench.host_s(is_on=False)) for _ in range(NUM_OVERHEAD_PAIRS)]
    differences = [on - off for on, off in pairs]
    low, _, high = quantiles(differences, n=4, method="inclusive")
    return Overhead(
        on_s=median(on for on, _ in pairs),
        off_s=median(off for _, off in pairs),
        difference_s=median(differences),
        spread_s=high - low,
        num_pairs=len(pairs),
    )


def _written(
    result: SelfTestResult, record: RunRecord, folder: RunFolder, box: Box | None, *, cache: Path, keeps_out: str
) -> SelfTestResult:
    """The files of a result, and the result with their paths; `keeps_out` says why its map must not be found again."""
    files = [folder.path / "settings.csv"]
    if result.contention:
        files += _surface(result).write(folder.path, "contention")
    notes, saved = list(result.notes), None
    is_right = {row.kind for row in result.rows if row.outcome is not SettingOutcome.WRONG}
    if box is None:
        notes.append("NVML does not say how this box is wired: there is nothing to keep a capability map by")
    elif result.rows:
        capability = capability_map(result, box)
        files.append(write_map(capability, folder.path))
        if not is_right:
            notes.append("the map is in the folder only: every result is wrong, NCCL's own choice too")
        elif keeps_out:
            notes.append(f"the map is in the folder only: {keeps_out}")
        elif result.is_interrupted and (cache / capability.key.file_name).exists():
            notes.append("the map is in the folder only: the one of a former run is kept, this one was interrupted")
        else:
            saved = write_map(capability, cache)
    final = replace(result, notes=tuple(notes), map_path=saved, files=(folder.path / "selftest.json", *files))
    folder.write(
        record, final, {files[0].name: _csv(result).encode(), "selftest.json": final.to_json().encode() + b"\n"}
    )
    return final


def capability_map(result: SelfTestResult, box: Box) -> CapabilityMap:
    """The map of a result."""
    facts, limits = result.facts, result.facts.limits
    key = MapKey(
        nccl=facts.nccl, gpu=box.gpu, num_gpus=facts.num_gpus, ranks_per_gpu=facts.ranks_per_gpu, topology=box.topology
    )
    return CapabilityMap(
        key=key,
        measured_on=datetime.now(UTC).date().isoformat(),
        max_channels=limits.num_channels if limits else None,
        rows=result.rows,
    )


def _csv(result: SelfTestResult) -> str:
    rows = result.table()
    text = io.StringIO()
    if rows:
        table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    return text.getvalue()


def _surface(result: SelfTestResult) -> ContentionSurface:
    facts: Facts = result.facts
    return ContentionSurface(
        provenance=Provenance.MEASURED,
        machine={
            "gpu": facts.gpu,
            "num_sms": str(facts.num_sms),
            "num_gpus": str(facts.num_gpus),
            "nccl": ".".join(map(str, facts.nccl)),
            "torch": facts.torch,
        },
        protocol={
            "order": "solo and overlapped batches alternate",
            "streams": "collectives at high priority, resident before the GEMM starts",
            "timing": "CUDA events around a batch of launches",
        },
        victims={},
        points=result.contention,
    )


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingDependencyError("the self-test of NCCL needs torch: pip install torch")


def _cuda_benches(request: SelfTestRequest) -> Callable[[Path], Benches]:
    from lagom_overlap.engines.nccl.gemm_contention import GemmContention  # noqa: PLC0415  torch is an extra
    from lagom_overlap.engines.nccl.plugin_bench import PluginBench, usable_gpus  # noqa: PLC0415  torch is an extra

    num_gpus = usable_gpus(request.num_gpus, request.ranks_per_gpu)

    def opened(folder: Path) -> Benches:
        bench = PluginBench(folder, num_gpus=num_gpus, ranks_per_gpu=request.ranks_per_gpu, library=request.library)
        return Benches(bench, bench, GemmContention(bench))

    return opened
