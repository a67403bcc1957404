"""Which route a job on NCCL takes, by its release of NCCL and its environment.

The plug-in needs to have been in the environment before NCCL made its first communicator (`lagom run` puts it there);
siblings need nothing. `LAGOM_ROUTE` chooses; without it, it is the route that sets channels under this release.
"""

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import nn

from lagom_overlap.collective.size_class import LEAST_BYTES
from lagom_overlap.errors import JobError
from lagom_overlap.nccl_plugin.capability import BoxMaps
from lagom_overlap.nccl_plugin.channel_limit import runs_uneven_gathers
from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.nccl_plugin.support import Knob, NcclVersion, RouteName, best_route
from lagom_overlap.online.device import DeviceEvent, job_device
from lagom_overlap.online.events import rank_of
from lagom_overlap.online.graph_captures import GRAPH_CAPTURES
from lagom_overlap.online.replaced_ranks import REPLACED_RANKS
from lagom_overlap.online.routes.base import Route
from lagom_overlap.online.routes.connections import Connections, connects_at_start
from lagom_overlap.online.routes.plugin import PluginRoute
from lagom_overlap.online.routes.plugin_events import StepTimer
from lagom_overlap.online.routes.plugin_owner import PLUGIN_OWNER
from lagom_overlap.online.routes.plugin_timer import KernelTimer
from lagom_overlap.online.routes.profile_timer import ProfileTimer, RingRecorder
from lagom_overlap.online.routes.sibling import SiblingRoute, open_nccl_sibling
from lagom_overlap.online.routes.sibling_adapters import attach, attach_all_to_all
from lagom_overlap.trace.gpu_trace import KnobReach

_log = logging.getLogger(__name__)

ROUTE_VARIABLE: Final = "LAGOM_ROUTE"
_PLUGIN_VARIABLES: Final = ("NCCL_TUNER_PLUGIN", "LAGOM_RECORD")
FIRST_WITH_GPU_TIMES: Final = (2, 27)
"""The release whose profiler interface says when a collective ran on the GPU."""


def open_nccl_route(
    model: nn.Module,
    nccl: NcclVersion,
    environment: Mapping[str, str] = os.environ,
    *,
    new_algorithms: bool = False,
) -> Route:
    """The route of a job on NCCL, in place; `new_algorithms` allows those that NCCL has not connected.

    Raises:
        JobError: if LAGOM_ROUTE names none, this NCCL has none, the plug-in was not in the environment, another tuner
            of this process has it, or ranks may be replaced.
        TableError: if the plug-in's record cannot be read.
    """
    name = environment.get(ROUTE_VARIABLE) or best_route(nccl, Knob.CHANNELS)
    match name:
        case RouteName.PLUGIN:
            return _plugin_route(environment, nccl, new_algorithms=new_algorithms)
        case RouteName.SIBLING:
            route = SiblingRoute("nccl", KernelTimer((KnobReach.TUNER, KnobReach.P2P_CHANNELS)), open_nccl_sibling)
            attach(model, route)
            attach_all_to_all(route)
            return route
        case None:
            raise JobError(f"NCCL {'.'.join(map(str, nccl))} lets nothing be set in a running job; 2.17 and later do")
        case _:
            raise JobError(f"{ROUTE_VARIABLE} is {name!r}; allowed: {RouteName.PLUGIN}, {RouteName.SIBLING}")


def _plugin_route(environment: Mapping[str, str], nccl: NcclVersion, *, new_algorithms: bool) -> PluginRoute:
    """The plug-in as NCCL has loaded it, with the record that it was started with."""
    REPLACED_RANKS.watch()
    if REPLACED_RANKS.by:
        raise JobError(
            f"{REPLACED_RANKS.by} replaces ranks while the others run on, and a rank that joins would not know what is "
            "set: its collectives would hang"
        )
    missing = [name for name in _PLUGIN_VARIABLES if not environment.get(name)]
    if missing:
        raise JobError(
            f"{', '.join(missing)} is not set in this rank: start the job with lagom run, or set LAGOM_ROUTE=sibling"
        )
    library, record = (environment[name] for name in _PLUGIN_VARIABLES)
    plugin, path = TunerPlugin(Path(library)), expanded(record, rank_of(environment))
    device = job_device()  # of the job's thread; the question comes from another one
    connections = Connections(
        lambda: torch.cuda.mem_get_info(device)[0],
        may_connect=new_algorithms,
        all_connected=connects_at_start(environment),
    )
    maps = BoxMaps.here(nccl)
    route = PluginRoute(
        plugin,
        record=path,
        timer=_step_timer(plugin, environment, nccl),
        connections=connections,
        maps=maps,
        runs_uneven_gathers=runs_uneven_gathers(nccl, environment),
    )
    PLUGIN_OWNER.take(route)
    GRAPH_CAPTURES.watch(route.begin_capture, route.end_capture)
    return route


def _step_timer(plugin: TunerPlugin, environment: Mapping[str, str], nccl: NcclVersion) -> StepTimer:
    """NCCL's profiler where the job was started with ours; else PyTorch's, and rank 0 says why."""
    kernels, rank = KernelTimer(), rank_of(environment)
    profiler, pattern = (environment.get(name, "") for name in ("NCCL_PROFILER_PLUGIN", "LAGOM_PROFILE"))
    why = ""
    if nccl < FIRST_WITH_GPU_TIMES:
        why = f"NCCL {'.'.join(map(str, nccl))} reports no times of the GPU, 2.27 and later do"
    elif profiler and Path(profiler).name != Path(environment["NCCL_TUNER_PLUGIN"]).name:
        why = f"NCCL_PROFILER_PLUGIN is {profiler}, which is left alone"
    elif not profiler or not pattern:
        why = "NCCL_PROFILER_PLUGIN and LAGOM_PROFILE are not both set: lagom run does that"
    if why:
        level = logging.WARNING if rank == 0 else logging.INFO
        _log.log(level, "measured steps are timed by PyTorch's profiler, not by NCCL's: %s", why)
        return kernels
    device = job_device()
    return ProfileTimer(
        kernels,
        RingRecorder(plugin, expanded(pattern, rank)),
        make_event=partial(DeviceEvent, device),
        synchronize=partial(torch.cuda.synchronize, device),
        least_bytes=LEAST_BYTES,
    )


def expanded(pattern: str, rank: int) -> Path:
    """A path as the plug-in reads it."""
    return Path(pattern.replace("%r", str(rank)).replace("%p", str(os.getpid())))
