"""Before how, whether: what changes to a traced job's collectives are predicted to gain or lose per step.

The groups that take most of a step are simulated as they ran and with the change, by the cost model of the trace's
GPU; each group's relative change counts on its measured makespan. How far the model misses a group as it ran widens the
interval in proportion. What no preset or no group tells is not asked. Only collectives that a knob reaches are
changed; the rest of the step stays as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lagom_overlap.analysis.concurrency_model import model_of
from lagom_overlap.analysis.estimate import PROFILE
from lagom_overlap.analysis.findings import Findings
from lagom_overlap.analysis.groups import TraceGroup
from lagom_overlap.analysis.trace_fit import MAX_GROUPS, default_of
from lagom_overlap.analysis.trace_gpu import cluster_of_trace
from lagom_overlap.analysis.traced_job import TracedGroup, traced_job
from lagom_overlap.collective import CommConfig, Protocol, Transport
from lagom_overlap.cost import ContentionModel
from lagom_overlap.errors import LagomError
from lagom_overlap.hardware import Cluster
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.sim.what_if import (
    COPY_ENGINES,
    MOST_CHANNELS,
    PROTOCOLS,
    AskedChange,
    Spent,
    WhatIf,
    best_first,
    what_if,
)
from lagom_overlap.trace.gpu_trace import NS_PER_S, KnobReach
from lagom_overlap.workload import CommOp

_MAX_KERNELS: Final = 1000
"""Kernels of a group beyond which it is not simulated here: analyze answers in seconds."""
_OF_GROUPS: Final = "as large a part of each overlap group's gain as it misses of the group as it ran"
_Change = Callable[[CommOp, CommConfig, KnobReach], CommConfig]


@dataclass(frozen=True, slots=True)
class _Group:
    traced: TracedGroup
    simulator: GroupSimulator
    default: tuple[CommConfig, ...]
    alone_s: float

    def gain_s(self, change: _Change) -> tuple[float, float] | None:
        """What a change gains per step, and how far the model's misfit of this group may move that; None: untouched."""
        traced = self.traced
        changed = tuple(
            change(op, config, reach)
            for op, config, reach in zip(traced.group.comms, self.default, traced.reaches, strict=True)
        )
        if changed == self.default:
            return None
        after_s = self.simulator.evaluate(changed).makespan_s
        gain_s = (1.0 - after_s / self.alone_s) * traced.makespan_s * traced.source.per_step
        return gain_s, abs(gain_s) * abs(self.alone_s / traced.makespan_s - 1.0)


def _model(findings: Findings, machine: Cluster | None) -> ContentionModel | None:
    clusters = (cluster_of_trace(rank.trace, machine) for rank in findings.ranks)
    cluster = next((cluster for cluster in clusters if cluster is not None), None)
    if cluster is None:
        return None
    most = max((row.key.num_ranks for row in findings.rows), default=1)
    nodes = max(cluster.num_nodes, -(-most // cluster.gpus_per_node))
    return model_of(replace(cluster, num_nodes=nodes), PROFILE)


def _groups(findings: Findings, groups: Sequence[TraceGroup], model: ContentionModel) -> list[_Group]:
    small = [group for group in groups if len(group.kernel_keys) <= _MAX_KERNELS]
    heaviest = sorted(small, key=lambda group: -group.makespan_ns * group.per_step)[:MAX_GROUPS]
    overlap_groups = []
    for traced in traced_job(findings, heaviest, model).groups:
        default = default_of(traced, model)
        try:
            simulator = GroupSimulator(traced.group, model)
            overlap_groups.append(_Group(traced, simulator, default, simulator.evaluate(default).makespan_s))
        except LagomError:  # ranks that the preset's nodes cannot hold, a configuration that the model does not have
            continue
    return overlap_groups


def _changes() -> Iterator[tuple[AskedChange, _Change]]:
    for most in MOST_CHANNELS:
        yield AskedChange.channels(most), _capped(most)
    for protocol in PROTOCOLS:
        yield AskedChange.protocol(protocol), _with_protocol(protocol)
    yield COPY_ENGINES, _copied


def _capped(most: int) -> _Change:
    def change(_: CommOp, config: CommConfig, reach: KnobReach) -> CommConfig:
        if reach is KnobReach.NONE or (config.num_channels or 0) <= most:
            return config
        return replace(config, num_channels=most)

    return change


def _with_protocol(protocol: Protocol) -> _Change:
    def change(_: CommOp, config: CommConfig, reach: KnobReach) -> CommConfig:
        if reach is not KnobReach.TUNER or config.protocol in (None, protocol):
            return config
        return replace(config, protocol=protocol, chunk_bytes=None, num_threads=None)

    return change


def _copied(_: CommOp, config: CommConfig, reach: KnobReach) -> CommConfig:
    return config if reach is KnobReach.NONE else CommConfig(transport=Transport.COPY_ENGINE)


def traced_what_ifs(
    findings: Findings, groups: Sequence[TraceGroup], machine: Cluster | None = None
) -> tuple[WhatIf, ...]:
    """The answers for a job traced on that machine, by default the preset of its GPU, best first.

    None where no preset has it, or no group can be simulated.
    """
    model = _model(findings, machine)
    modelled = [] if model is None else _groups(findings, groups, model)
    windows = findings.num_windows * NS_PER_S
    overlapped_s = sum(rank.measures.overlap_ns for rank in findings.ranks) / windows
    exposed_s = sum(rank.measures.exposed_comm_ns for rank in findings.ranks) / windows
    step_s = sum(rank.measures.span_ns for rank in findings.ranks) / windows
    before = Spent(step_s=step_s, overlapped_s=overlapped_s, exposed_s=exposed_s)
    answers = []
    for asked, change in _changes() if modelled else ():
        gains = [found for group in modelled if (found := _tried(group, change)) is not None]
        if gains:
            gain_s = sum(gain for gain, _ in gains)
            after = replace(before, step_s=step_s - gain_s, exposed_s=max(exposed_s, exposed_s - gain_s))
            more_s = sum(unsure for _, unsure in gains)
            answers.append(what_if(asked, before, after, more_error_s=more_s, more_error=_OF_GROUPS))
    return best_first(answers)


def _tried(group: _Group, change: _Change) -> tuple[float, float] | None:
    """The change in one group; None where nothing is changed or the model cannot run it."""
    try:
        return group.gain_s(change)
    except (LagomError, ValueError):
        return None
