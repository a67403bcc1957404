"""`lagom analyze` of rings of our NCCL profiler plug-in: each call site's GPU time, and what the network did for it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from lagom_overlap.nccl_plugin.profile_log import ProfiledCollective, ProfiledNetwork, is_profile, read_profile
from lagom_overlap.results.nccl_profile import NcclProfileResult, NetworkOfSite, ProfiledSite
from lagom_overlap.units import NS


def are_profiles(paths: Sequence[Path]) -> bool:
    """Whether all of them are files that begin as a profile does."""
    return bool(paths) and all(is_profile(path) for path in paths)


def analyze_profiles(paths: Sequence[Path]) -> NcclProfileResult:
    """The sites of all rings, longest time on the GPU first.

    Raises:
        TableError: if one is not a profile of this version.
    """
    logs = [read_profile(path) for path in paths]
    sites: dict[tuple[object, ...], list[ProfiledCollective]] = defaultdict(list)
    for log in logs:
        for call in log.collectives:
            way = (call.algorithm, call.protocol, call.num_channels)
            sites[(call.rank, call.comm_id, call.kind, call.num_bytes, *way)].append(call)
    rows = [_site(calls) for calls in sites.values()]
    rows.sort(key=lambda site: (-(site.gpu_s or 0.0) * site.num_calls, site.rank, site.kind, site.num_bytes or 0))
    return NcclProfileResult(
        files=tuple(path.name for path in paths), num_lost=sum(log.num_lost for log in logs), sites=tuple(rows)
    )


def _site(calls: Sequence[ProfiledCollective]) -> ProfiledSite:
    first = calls[0]
    times_s = [call.duration_s for call in calls if call.duration_s is not None]
    networks = [call.network for call in calls if call.network is not None]
    return ProfiledSite(
        rank=first.rank,
        communicator=f"{first.comm_id:016x}",
        num_ranks=first.num_ranks,
        kind=first.kind,
        num_bytes=first.num_bytes,
        algorithm=first.algorithm,
        protocol=first.protocol,
        num_channels=first.num_channels,
        num_calls=len(calls),
        num_captured=sum(call.is_captured for call in calls),
        num_incomplete=sum(not call.is_complete for call in calls),
        gpu_s=median(times_s) if times_s else None,
        network=_network(networks) if networks else None,
    )


def _network(networks: Iterable[ProfiledNetwork]) -> NetworkOfSite:
    calls = tuple(networks)
    return NetworkOfSite(
        sent_bytes=median(call.sent_bytes for call in calls),
        received_bytes=median(call.received_bytes for call in calls),
        span_s=median((call.end_ns - call.start_ns) * NS for call in calls),
        busy_s=median(call.busy_s for call in calls),
        send_gpu_wait_s=median(call.send_gpu_wait_s for call in calls),
        send_peer_wait_s=median(call.send_peer_wait_s for call in calls),
        send_network_s=median(call.send_network_s for call in calls),
        receive_network_s=median(call.receive_network_s for call in calls),
        receive_flush_s=median(call.receive_flush_s for call in calls),
        receive_gpu_wait_s=median(call.receive_gpu_wait_s for call in calls),
    )
