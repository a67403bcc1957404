"""The contention model's constants fitted to the groups of one trace.

    constant               scales                                                          start
    link_bytes_per_s       the wire inside a node, or between nodes where the ranks span several   the preset's
    channel_bytes_per_s    what one channel copies                                         the profile's
    latency_scale          launch, hop and slice times                                     1
    amplification          memory traffic of communication (kappa)                         the profile's

fitted to the logarithms of the groups' simulated over measured makespans and collectives. One trace shows one setting:
as a rule it cannot tell a slow wire from slow channels, and the fit says so. A constant that is not identified stays
near its start, and what follows from it is the preset's word, not the trace's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Final

from lagom_overlap.analysis.traced_job import TracedGroup
from lagom_overlap.collective import CommConfig
from lagom_overlap.cost import ContentionModel
from lagom_overlap.cost.fit import Constant, Fit, fit_constants
from lagom_overlap.cost.profile import ByLink, ByProtocol, LinkSource
from lagom_overlap.sim import GroupSimulator

MAX_GROUPS: Final = 6
"""A fit looks at this many groups, longest share of a step first. Chosen, not measured."""
_COMM_WEIGHT: Final = 0.5
"""Of a collective's own time against a makespan, which counts for what tuning changes. Chosen."""
_LEAST_AMPLIFICATION: Final = 0.05
"""Contention that is fitted never vanishes: at 0 its logarithm would have no derivative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFit(Fit):
    """The fitted model; the residuals are the makespans' of all groups."""

    model: ContentionModel


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
            amplification=values["amplification"],
            slice_overhead_s=_scaled_link(profile.slice_overhead_s, latency),
            ring_base_s=_scaled_protocol(profile.ring_base_s, latency),
            tree_base_s=_scaled_protocol(profile.tree_base_s, latency),
        ),
    )


def _constants(traced: Sequence[TracedGroup], model: ContentionModel) -> list[Constant]:
    cluster, profile = model.cluster, model.profile
    spans = {cluster.num_nodes_of(comm.collective.num_ranks) > 1 for group in traced for comm in group.group.comms}
    constants = []
    for between, name, link in ((False, "intra", cluster.intra), (True, "inter", cluster.inter)):
        if between in spans:
            rate = link.bytes_per_s
            constants.append(Constant(f"{name}.bytes_per_s", rate, rate / 100, rate * 20))
    channel = profile.for_gpu(cluster.gpu).channel_bytes_per_s
    kappa = max(_LEAST_AMPLIFICATION, profile.amplification)
    return [
        *constants,
        Constant("channel_bytes_per_s", channel, channel / 100, channel * 10),
        Constant("latency_scale", 1.0, 0.05, 50.0),
        Constant("amplification", kappa, _LEAST_AMPLIFICATION, 6.0),
    ]


def fit_trace(traced: Sequence[TracedGroup], model: ContentionModel) -> TraceFit:
    """The model whose simulated groups come nearest to the measured ones.

    Raises:
        ValueError: if there is no group.
    """
    if not traced:
        raise ValueError("no group to fit the model to")
    constants = _constants(traced, model)
    names = [constant.name for constant in constants]
    heaviest = sorted(traced, key=lambda held: -held.makespan_s * held.source.per_step)[:MAX_GROUPS]
    defaults = {held.group.name: default_of(held, model) for held in traced}

    def residuals(values: Sequence[float]) -> list[float]:
        found = model_with(model, dict(zip(names, values, strict=True)))
        left: list[float] = []
        for held in heaviest:
            times = GroupSimulator(held.group, found).evaluate(defaults[held.group.name])
            left.append(log(times.makespan_s / held.makespan_s))
            left += [
                _COMM_WEIGHT * log(ours / theirs) if theirs > 0 else 0.0
                for ours, theirs in zip(times.comm_s, held.comm_s, strict=True)
            ]
        return left

    table = fit_constants(residuals, constants)
    fitted = model_with(model, {held.name: held.value for held in table})
    return TraceFit(
        model=fitted,
        table=table,
        log_residuals=tuple(
            log(GroupSimulator(held.group, fitted).evaluate(defaults[held.group.name]).makespan_s / held.makespan_s)
            for held in traced
        ),
    )
