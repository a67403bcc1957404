"""A job that `lagom run --observe` started: nothing is changed; a few steps are sampled under PyTorch's profiler."""

import contextlib
import gzip
import logging
import shlex
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Final

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.errors import OutputError, TraceError
from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.nccl_plugin.record_log import Flag, RecordedDecision, RecordLog, read_record
from lagom_overlap.nccl_plugin.support import NcclVersion
from lagom_overlap.online.conclusions import command_text
from lagom_overlap.online.device import job_device, note_model
from lagom_overlap.online.events import JsonLines, PrometheusFile
from lagom_overlap.online.guest import say
from lagom_overlap.online.job_profiler import OWN_PROFILER, exported
from lagom_overlap.online.launch_steps import is_trained_in_parallel
from lagom_overlap.online.observe import Sampler, SeenCall, Shares, conclusion, report_lines
from lagom_overlap.online.one_setting import OneSetting
from lagom_overlap.record import make_folder, write_private
from lagom_overlap.results.conclusion import Conclusion
from lagom_overlap.trace.gpu_trace import NS_PER_S, KnobReach
from lagom_overlap.trace.operators import read_operators
from lagom_overlap.trace.reader import ReadOptions, read_file
from lagom_overlap.units import format_bytes, format_seconds

MOST_TRACES: Final = 8
"""Ranks whose last sampled step is kept as a trace: one per role suffices, and a trace may have 100 MB unpacked."""
MOST_SITES: Final = 8
"""How many sites are listed; the rest are only counted. Chosen to keep the report on one screen."""

_Site = tuple[int, int, CollectiveKind, int]


def record_lines(log: RecordLog, most: int = MOST_SITES) -> list[str]:
    """The call sites in the plug-in's record and what NCCL offers and prefers there, the slowest first.

    The times are NCCL's predictions from its cost tables, not measurements; they only rank the sites. Empty if NCCL
    never asked the tuner.
    """
    ranks = {communicator.comm_id: communicator for communicator in log.communicators}
    sites: dict[_Site, list[RecordedDecision]] = defaultdict(list)
    for decision in log.decisions:
        if Flag.NOT_COUNTED not in decision.flags and decision.comm_id in ranks:
            caller = ranks[decision.comm_id]
            sites[caller.num_ranks, caller.creation_order, decision.kind, decision.num_bytes].append(decision)
    if not sites:
        return []
    total_s = {site: sum(_predicted_s(decision) for decision in decisions) for site, decisions in sites.items()}
    ordered = sorted(sites, key=lambda site: (-total_s[site], site))
    lost = f", {log.num_lost} older entries were overwritten" if log.num_lost else ""
    lines = [f"NCCL asked the tuner about {len(sites)} call sites on {len(ranks)} communicators{lost}; largest first:"]
    lines += [f"  {_words(site, sites[site])}" for site in ordered[:most]]
    if len(ordered) > most:
        lines.append(f"  and {len(ordered) - most} more")
    return lines


def _predicted_s(decision: RecordedDecision) -> float:
    return min(decision.offered_s.values(), default=0.0)


def _words(site: _Site, decisions: list[RecordedDecision]) -> str:
    num_ranks, order, kind, num_bytes = site
    where = f"{kind} {format_bytes(num_bytes)} on {num_ranks} ranks" + (f" #{order}" if order else "")
    preferred = Counter(min(d.offered_s, key=lambda way: d.offered_s[way]) for d in decisions if d.offered_s)
    if not preferred:
        return f"{where}, {len(decisions)} calls (NCCL 2.21 tells no costs)"
    (algorithm, protocol), _ = preferred.most_common(1)[0]
    others = len({way for decision in decisions for way in decision.offered_s}) - 1
    predicted = format_seconds(median(_predicted_s(decision) for decision in decisions))
    return (
        f"{where}, {len(decisions)} calls: {algorithm}/{protocol}, predicted {predicted}; {others} other ways on offer"
    )


_log = logging.getLogger(__name__)


class ProfiledStep:
    """One step under the profiler at a time; the last one's trace stays at `keep`, if that is given."""

    def __init__(self, keep: Path | None = None) -> None:
        self._keep = keep

    @staticmethod
    def begin() -> None:
        """Starts the profiler."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        # NCCL's kernels say how many bytes they move, gloo's runs do not: there the operators' shapes tell.
        OWN_PROFILER.start(activities=activities, record_shapes=not torch.cuda.is_available())

    def end(self) -> list[SeenCall] | None:
        """The step's collectives; None if the profiler was taken away meanwhile, or its file cannot be read."""
        if torch.cuda.is_available():
            torch.cuda.synchronize(job_device())
        profiler = OWN_PROFILER.stop()
        if profiler is None:
            return None
        try:
            with exported(profiler) as path:
                self._keep_trace(path)
                return kernels_of(path) if torch.cuda.is_available() else gloo_runs_of(path)
        except (RuntimeError, OSError, TraceError) as error:
            _log.debug("the sample is void: %s", error)
            return None

    def _keep_trace(self, path: Path) -> None:
        if self._keep is None:
            return
        try:
            if not self._keep.parent.is_dir():
                with contextlib.suppress(OutputError):  # another rank was first
                    make_folder(self._keep.parent)
            write_private(self._keep, gzip.compress(path.read_bytes(), compresslevel=1))
        except (OSError, OutputError) as error:
            _log.warning("the sampled step is not kept: %s", error)
            self._keep = None

    @property
    def kept(self) -> Path | None:
        """The trace that is there, if any."""
        return self._keep if self._keep is not None and self._keep.exists() else None


def kernels_of(path: Path) -> list[SeenCall]:
    """The collectives among the kernels of a step's trace."""
    return [
        SeenCall(
            call.kind,
            call.duration_ns / NS_PER_S,
            is_reachable=call.reach is not KnobReach.NONE,
            num_bytes=call.num_bytes,
        )
        for trace in read_file(path, ReadOptions())
        for call in trace.calls
    ]


def gloo_runs_of(path: Path) -> list[SeenCall]:
    """The collectives that gloo's threads ran in a step."""
    return [
        SeenCall(call.kind, call.seconds, num_bytes=call.num_bytes) for call in read_operators(path, ()).collectives
    ]


class Observing(OneSetting):
    """Samples a few steps and says what could be reached; see `observe`."""

    def __init__(
        self,
        nccl: NcclVersion | None,
        events: JsonLines,
        metrics: PrometheusFile,
        *,
        rank: int,
        record: Path | None = None,
        plugin: TunerPlugin | None = None,
        traces: Path | None = None,
    ) -> None:
        """`traces`: the folder in which the last sampled step of each of the first ranks stays; None: nowhere."""
        OWN_PROFILER.watch()
        self._shares = Shares(nccl)
        self._step = ProfiledStep(traces / f"rank{rank}.json.gz" if traces is not None and rank < MOST_TRACES else None)
        self._is_in_adapter = False
        self._sampler = Sampler(self._shares, self._step.begin, self._step.end, OWN_PROFILER.why_not)
        self._events, self._metrics, self._rank = events, metrics, rank
        self._record, self._plugin = record, plugin
        self._is_said = False

    def on_model(self, model: nn.Module) -> None:
        """Notes the model."""
        note_model(model)
        self._is_in_adapter = is_trained_in_parallel(model)
        self._events.write("model", type=type(model).__name__)

    def on_step(self) -> None:
        """Samples; after the last sample the report."""
        if self._sampler.next_step():
            self._say()

    @staticmethod
    def why_void() -> str:
        """Nothing: the job ran untouched, but for a few sampled steps."""
        return ""

    def conclusion(self) -> Conclusion:
        """What was seen, and what to type to use it."""
        kept = self._step.kept
        return conclusion(
            self._shares,
            self._sampler.reason,
            command_text(),
            trace="" if kept is None else shlex.quote(str(kept.parent)),
            is_in_adapter=self._is_in_adapter,
        )

    def close(self) -> None:
        """The report of what there is, if it was not said."""
        self._sampler.close()
        self._say()

    def _say(self) -> None:
        if self._is_said:
            return
        self._is_said = True
        shares = self._shares
        num = max(1, shares.num_steps)
        for kind, time_s in shares.by_kind_s.items():
            self._metrics.set("lagom_communication_seconds", time_s / num, kind=kind)
            self._events.write("communication", kind=kind, seconds_per_step=time_s / num)
        for knob, ratio in shares.ratios().items():
            self._metrics.set("lagom_reachable_ratio", ratio, knob=knob)
            self._events.write("reachable", knob=knob, ratio=ratio)
        self._metrics.flush()
        if self._rank == 0:
            say(report_lines(shares, self._sampler.reason))
            if self._record is not None and self._plugin is not None and self._record.exists():
                self._plugin.flush_record()
                say(record_lines(read_record(self._record)))
