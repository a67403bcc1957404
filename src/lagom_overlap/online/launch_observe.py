"""A job that `lagom run --observe` started: nothing is changed; a few steps are sampled."""

from pathlib import Path

from torch import nn

from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.nccl_plugin.record_log import read_record
from lagom_overlap.nccl_plugin.support import NcclVersion
from lagom_overlap.online.device import note_model
from lagom_overlap.online.events import JsonLines, PrometheusFile
from lagom_overlap.online.guest import say
from lagom_overlap.online.job_profiler import OWN_PROFILER
from lagom_overlap.online.observe import Sampler, Shares, report_lines
from lagom_overlap.online.observe_profiler import ProfiledStep
from lagom_overlap.online.observe_record import record_lines


class Observing:
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
    ) -> None:
        OWN_PROFILER.watch()
        self._shares = Shares(nccl)
        self._sampler = Sampler(self._shares, ProfiledStep.begin, ProfiledStep.end, OWN_PROFILER.why_not)
        self._events, self._metrics, self._rank = events, metrics, rank
        self._record, self._plugin = record, plugin
        self._is_said = False

    def on_model(self, model: nn.Module) -> None:
        """Notes the model."""
        note_model(model)
        self._events.write("model", type=type(model).__name__)

    def on_step(self) -> None:
        """Samples; after the last sample the report."""
        if self._sampler.next_step():
            self._say()

    def on_update(self) -> None:
        """Nothing: the sampled step ends where the next one begins."""

    @staticmethod
    def may_end() -> bool:
        """Always: nothing of the job was changed."""
        return True

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
