"""The contention model's constants fitted to the groups of one trace, or of one half of it.

    constant               scales                                                          start
    link_bytes_per_s       the wire inside a node, or between nodes where the ranks span several   the preset's
    channel_bytes_per_s    what one channel copies                                         the profile's
    latency_scale          launch, hop and slice times                                     1
    slowdown.CLASS         what collectives add to the time of a class of kernels          1
    time.KIND              the time of a kind of collective; of the heaviest it is 1       1

fitted to the logarithms of simulated over measured times: of groups, of their collectives, of each class of kernels in
a group. One trace shows one setting: as a rule it cannot tell a slow wire from slow channels, and the fit says so. A
constant that is not identified stays near its start, and what follows from it is the preset's word, not the trace's.

A kernel whose time alone is an estimate says nothing of its class's slowdown, as that estimate is made with it. While
the others are fitted it is slowed as the model has it; then the groups are built with what the others said.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp, log
from typing import Final

from lagom_overlap.analysis.findings import Findings
from lagom_overlap.analysis.groups import TraceGroup
from lagom_overlap.analysis.kernel_class import KernelClass
from lagom_overlap.analysis.traced_job import TracedGroup, TracedJob, traced_job
from lagom_overlap.collective import CollectiveKind, CommConfig
from lagom_overlap.cost import ContentionModel
from lagom_overlap.cost.fit import Constant, Fit, FittedConstant, fit_constants
from lagom_overlap.cost.profile import ByLink, ByProtocol, LinkSource
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.workload import CompOp, Kernel, OverlapGroup

MAX_GROUPS: Final = 6
"""A fit looks at this many groups, longest share of a step first. Chosen, not measured."""
MAX_KERNELS: Final = 4000
"""Kernels that a fit simulates again and again, the heaviest group's and the next ones': for seconds, not minutes."""
_MAX_STEPS: Final = 10
"""A fit wanders along what the trace does not determine: the example is 2.6 % off after 10 steps, 2.4 % at the end."""
_TOLERANCE: Final = 1e-4
"""A fit ends where its squares fall by less than this share; traces are not known to five digits."""
_PART_WEIGHT: Final = 0.5
"""Of a collective or a class of kernels, next to 1 of the makespan that they make up. Chosen, not measured."""
_MOST_SCALE: Final = 100.0
"""Bounds of a factor: where the model has next to no slowdown, a small one is many times as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFit(Fit):
    """The fitted model, and the groups with the fitted slowdowns in their kernels; the residuals are of makespans."""

    model: ContentionModel
    job: TracedJob

    def makespans_s(self) -> dict[str, float]:
        """The simulated makespans by group."""
        return {
            traced.group.name: exp(left) * traced.makespan_s
            for traced, left in zip(self.job.groups, self.log_residuals, strict=True)
        }


def default_of(traced: TracedGroup, model: ContentionModel) -> tuple[CommConfig, ...]:
    """What the trace ran: its channels, all else as the model's default."""
    most = model.cluster.gpu.num_sms - 1
    configs = []
    for comm, channels in zip(traced.group.comms, traced.channels, strict=True):
        default = replace(model.default_config(comm.collective), num_threads=None)
        configs.append(replace(default, num_channels=min(most, channels)) if channels else default)
    return tuple(configs)


def _scaled_link(link: ByLink, scale: float) -> ByLink:
    return ByLink(nvlink=scale * link.nvlink, pcie=scale * link.pcie, network=scale * link.network)


def _scaled_protocol(values: ByProtocol, scale: float) -> ByProtocol:
    return ByProtocol(ll=scale * values.ll, ll128=scale * values.ll128, simple=scale * values.simple)


def model_with(model: ContentionModel, values: Mapping[str, float]) -> ContentionModel:
    """The model with other constants, by the names of the table above."""
    cluster, profile = model.cluster, model.profile
    latency = values["latency_scale"]
    known = replace(profile.for_gpu(cluster.gpu), channel_bytes_per_s=values["channel_bytes_per_s"])
    wires = {
        name: replace(link, bytes_per_s=values.get(f"{name}.bytes_per_s", link.bytes_per_s), hop_s=latency * link.hop_s)
        for name, link in (("intra", cluster.intra), ("inter", cluster.inter))
    }
    return ContentionModel(
        replace(cluster, intra=wires["intra"], inter=wires["inter"]),
        replace(
            profile,
            links=LinkSource.STATED,  # the trace's own wire takes the place of a published one
            fitted={cluster.gpu.name: known},
            slice_overhead_s=_scaled_link(profile.slice_overhead_s, latency),
            ring_base_s=_scaled_protocol(profile.ring_base_s, latency),
            tree_base_s=_scaled_protocol(profile.tree_base_s, latency),
        ),
        collective_scales=tuple((kind, values[name]) for kind in CollectiveKind if (name := _time_of(kind)) in values),
    )


def _time_of(kind: CollectiveKind) -> str:
    return f"time.{kind.value}"


def _slowdown_of(kernel_class: KernelClass) -> str:
    return f"slowdown.{kernel_class.value}"


def _slowed(
    traced: TracedGroup, values: Mapping[str, float], scaled: dict[tuple[Kernel, float], Kernel]
) -> OverlapGroup:
    """The group with its classes' factors in the kernels whose time alone was measured."""
    computations = []
    for op, was in zip(traced.group.computations, traced.ops, strict=True):
        scale = 1.0 if was is None or was.is_estimated else values.get(_slowdown_of(was.kernel_class), 1.0)
        if scale == 1.0 or not isinstance(op.work, Kernel):
            computations.append(op)
            continue
        key = op.work, scale
        work = scaled.get(key) or scaled.setdefault(key, replace(op.work, slowdown_scale=scale))
        computations.append(CompOp(name=op.name, work=work))
    return replace(traced.group, computations=tuple(computations))


def _constants(traced: Sequence[TracedGroup], model: ContentionModel) -> list[Constant]:
    cluster, profile = model.cluster, model.profile
    spans = {
        cluster.num_nodes_of(comm.collective.num_ranks) > 1
        for traced_group in traced
        for comm in traced_group.group.comms
    }
    constants = []
    for between, name, link in ((False, "intra", cluster.intra), (True, "inter", cluster.inter)):
        if between in spans:
            rate = link.bytes_per_s
            constants.append(Constant(f"{name}.bytes_per_s", rate, rate / 100, rate * 20))
    channel = profile.for_gpu(cluster.gpu).channel_bytes_per_s
    return [
        *constants,
        Constant("channel_bytes_per_s", channel, channel / 100, channel * 10),
        Constant("latency_scale", 1.0, 0.05, 50.0),
        *(Constant(name, 1.0, 1 / _MOST_SCALE, _MOST_SCALE) for name in _scales(traced)),
    ]


def _scales(traced: Sequence[TracedGroup]) -> list[str]:
    """The factors that the groups can say something of: classes that were slowed, kinds next to the heaviest one."""
    classes: dict[KernelClass, None] = {}
    weights: dict[CollectiveKind, float] = defaultdict(float)
    for traced_group in traced:
        classes |= {
            op.kernel_class: None for op in traced_group.ops if op is not None and op.is_slowed and not op.is_estimated
        }
        for comm, comm_s in zip(traced_group.group.comms, traced_group.comm_s, strict=True):
            weights[comm.collective.kind] += comm_s * traced_group.source.per_step
    kinds = sorted(weights, key=lambda kind: -weights[kind])[1:]
    return [*map(_slowdown_of, classes), *map(_time_of, kinds)]


def _class_sums(traced: TracedGroup, lengths_s: Sequence[float]) -> dict[KernelClass, float]:
    """Seconds by class of the kernels that a collective slowed and whose time alone was measured."""
    sums: dict[KernelClass, float] = defaultdict(float)
    for op, length_s in zip(traced.ops, lengths_s, strict=True):
        if op is not None and op.is_slowed and not op.is_estimated:
            sums[op.kernel_class] += length_s
    return sums


def _residuals(
    traced: TracedGroup, group: OverlapGroup, model: ContentionModel, default: Sequence[CommConfig]
) -> list[float]:
    """log(simulated / measured): of the makespan, of the collectives, of the classes of kernels, in a fixed order."""
    starts, ends = GroupSimulator(group, model).run(default)
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    num_comms = len(traced.comm_s)
    ours = _class_sums(traced, lengths[num_comms:])
    theirs = _class_sums(traced, [0.0 if op is None else op.measured_s for op in traced.ops])
    pairs = [
        *zip(lengths[:num_comms], traced.comm_s, strict=True),
        *((ours[kernel_class], theirs[kernel_class]) for kernel_class in theirs),
    ]
    parts = [_PART_WEIGHT * log(mine / measured) if measured > 0 else 0.0 for mine, measured in pairs]
    return [log(max(ends) / traced.makespan_s), *parts]


def _fitted(traced: Sequence[TracedGroup], model: ContentionModel) -> tuple[FittedConstant, ...]:
    heaviest = _heaviest(traced)
    constants = _constants(heaviest, model)
    names = [constant.name for constant in constants]
    defaults = [default_of(traced_group, model) for traced_group in heaviest]
    scaled: dict[tuple[Kernel, float], Kernel] = {}

    def residuals(values: Sequence[float]) -> list[float]:
        tried = dict(zip(names, values, strict=True))
        tried_model = model_with(model, tried)
        return [
            left
            for traced_group, default in zip(heaviest, defaults, strict=True)
            for left in _residuals(traced_group, _slowed(traced_group, tried, scaled), tried_model, default)
        ]

    return fit_constants(residuals, constants, tolerance=_TOLERANCE, max_steps=_MAX_STEPS)


def _heaviest(traced: Sequence[TracedGroup]) -> list[TracedGroup]:
    """The groups that a fit looks at."""
    by_weight = sorted(traced, key=lambda traced_group: -traced_group.makespan_s * traced_group.source.per_step)
    most = accumulate(len(traced_group.ops) for traced_group in by_weight)
    return [
        traced_group
        for at, (traced_group, num) in enumerate(zip(by_weight, most, strict=True))
        if not at or num <= MAX_KERNELS
    ][:MAX_GROUPS]


def fit_trace(
    findings: Findings, groups: Sequence[TraceGroup], model: ContentionModel, *, half: int | None = None
) -> TraceFit | None:
    """The model whose simulated groups come nearest to the measured ones; None where no group can be simulated.

    With a `half` (0 or 1), `groups` are those of that half of the trace's windows, and no time of the other is used.
    """
    first = traced_job(findings, groups, model, half=half)
    if not first.groups:
        return None
    table = _fitted(first.groups, model)
    values = {held.name: held.value for held in table}
    fitted = model_with(model, values)
    scales = {held: values[name] for held in KernelClass if (name := _slowdown_of(held)) in values}
    job = traced_job(findings, groups, model, half=half, scales=scales)
    return TraceFit(
        model=fitted,
        table=table,
        job=job,
        log_residuals=tuple(
            log(GroupSimulator(held.group, fitted).evaluate(default_of(held, model)).makespan_s / held.makespan_s)
            for held in job.groups
        ),
    )
