"""What `lagom analyze` says of a ring of our NCCL profiler plug-in. Format of its JSON: docs/formats_analyze.md."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lagom_overlap.results.base import Result, Row
from lagom_overlap.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOfSite:
    """Medians over the calls of a site that went over the network; see `ProfiledNetwork` for what each is."""

    sent_bytes: float
    received_bytes: float
    span_s: float
    busy_s: float
    send_gpu_wait_s: float
    send_peer_wait_s: float
    send_network_s: float
    receive_network_s: float
    receive_flush_s: float
    receive_gpu_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledSite:
    """Calls of one kind and size on one communicator by one implementation; `gpu_s`: median of the complete ones."""

    rank: int
    communicator: str
    num_ranks: int
    kind: str
    num_bytes: int | None
    algorithm: str | None
    protocol: str | None
    num_channels: int | None
    num_calls: int
    num_captured: int
    num_incomplete: int
    gpu_s: float | None
    network: NetworkOfSite | None


@dataclass(frozen=True, kw_only=True)
class NcclProfileResult(Result):
    """All sites, by the GPU time of all their calls; `num_lost` entries were overwritten before they were read."""

    tool: str = "lagom analyze"
    files: tuple[str, ...]
    num_lost: int
    sites: tuple[ProfiledSite, ...]

    def summary(self) -> str:
        """A line or two for each site."""
        lost = f"; {self.num_lost} older entries were overwritten" if self.num_lost else ""
        num = sum(site.num_calls for site in self.sites)
        lines = [f"{num} collectives at {len(self.sites)} call sites{lost}; medians, GPU time by channels' own clocks:"]
        for site in self.sites:
            lines.append("  " + _words(site))
            if site.network is not None:
                lines.append("    " + _network_words(site.network))
        return "\n".join(lines)

    def table(self) -> Sequence[Row]:
        """One row per site, the network's columns None where it was not used."""
        none = dict.fromkeys(NetworkOfSite.__dataclass_fields__)
        rows: list[Row] = []
        for site in self.sites:
            own = {name: value for name, value in asdict(site).items() if name != "network"}
            rows.append(own | (asdict(site.network) if site.network is not None else none))
        return rows


def _words(site: ProfiledSite) -> str:
    size = "of unknown size" if site.num_bytes is None else format_bytes(site.num_bytes)
    way = f"{site.algorithm or 'unknown'}/{site.protocol or 'unknown'}"
    channels = "" if site.num_channels is None else f", {site.num_channels} channels"
    took = "not timed" if site.gpu_s is None else format_seconds(site.gpu_s)
    captured = f", {site.num_captured} by CUDA graphs" if site.num_captured else ""
    missing = f", {site.num_incomplete} incomplete" if site.num_incomplete else ""
    return (
        f"rank {site.rank}: {site.kind} {size} on {site.num_ranks} ranks ({site.communicator}), {way}{channels}: "
        f"{site.num_calls} calls{captured}{missing}, {took}"
    )


def _network_words(network: NetworkOfSite) -> str:
    sent, received = format_bytes(network.sent_bytes), format_bytes(network.received_bytes)
    seconds = {
        "GPU": network.send_gpu_wait_s,
        "peer": network.send_peer_wait_s,
        "network": network.send_network_s,
    }
    sends = ", ".join(f"{name} {format_seconds(time_s)}" for name, time_s in seconds.items())
    seconds = {
        "data": network.receive_network_s,
        "flush": network.receive_flush_s,
        "GPU": network.receive_gpu_wait_s,
    }
    receipts = ", ".join(f"{name} {format_seconds(time_s)}" for name, time_s in seconds.items())
    return (
        f"network: {sent} sent, {received} received in {format_seconds(network.span_s)}, busiest channel "
        f"{format_seconds(network.busy_s)}; all sends waited for {sends}; receipts for {receipts}"
    )
