"""Reads the ring of our NCCL profiler plug-in (`LAGOM_PROFILE`): when each collective started and ended on the GPU.

GPU times are the `globaltimer` that each block of the kernel reads when it starts and when it ends; host times are
CLOCK_MONOTONIC (`time.monotonic_ns` on Linux). The two clocks have different zeros.
Points in time stay whole nanoseconds: globaltimer counts from 1970, and a float of seconds since then is 240 ns coarse.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lagom_overlap.collective import Algorithm, CollectiveKind, Protocol
from lagom_overlap.nccl_plugin import table_layout as layout
from lagom_overlap.nccl_plugin.ring_file import RingFile, RingFormat, read_ring
from lagom_overlap.record import starts_with
from lagom_overlap.units import NS


class ProfileEvent(IntEnum):
    """What an entry of the ring is about."""

    COMMUNICATOR = 1
    COLLECTIVE = 2
    CHANNEL = 3


class ProfileFlag(IntFlag):
    """What is special about a collective."""

    INCOMPLETE = 1
    CAPTURED = 2
    SYMMETRIC = 4
    NETWORK_INCOMPLETE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCommunicator:
    """A communicator as NCCL announced it to this rank; `comm_id` is this run's, as the tuner's from 2.28 on."""

    comm_id: int
    rank: int
    num_ranks: int
    num_nodes: int
    abi_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledChannel:
    """One channel of a collective, on the GPU's clock."""

    channel: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledNetwork:
    """What this process's proxy thread did over the network for a collective.

    Host times. Those called `_s` are sums over transfers (steps), of which up to eight of each channel and peer are
    under way at once, so they may be longer than the collective. A send waits for the GPU's data, for the receiver to
    be ready, then for the network; a receipt for its data, which includes the sender's delay, for the flush to the
    GPU, and for the GPU to take it. `busy_s` is the longest time that one channel had a send to one peer in the
    network, and `start_ns` to `end_ns` is from the first transfer posted to the last one done.
    """

    num_sends: int
    num_receipts: int
    sent_bytes: int
    received_bytes: int
    send_gpu_wait_s: float
    send_peer_wait_s: float
    send_network_s: float
    receive_network_s: float
    receive_flush_s: float
    receive_gpu_wait_s: float
    busy_s: float
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCollective:
    """One collective of one rank.

    `call` counts from 0 for each communicator and kind, alike on all ranks; `num_bytes` is the larger of send and
    receive buffer, None for an element type that the plug-in does not know. Host times: `called_ns` the API call (of a
    captured collective its capture; None under NCCL 2.27), `launched_ns` after the launch, `seen_ns` when NCCL's proxy
    thread reported the last end (None: none came). GPU times: first channel's start, last channel's end, None where
    none was seen. `num_channels` is None where NCCL does not say (CollNet). A collective that is not complete was given
    up, or its communicator was destroyed, before all channels had ended. `channels` is empty unless
    LAGOM_PROFILE_CHANNELS is set. `launch` numbers the kernels of this process: the collectives of one group have one
    number where NCCL runs them in one kernel, and then their times are those of the kernel's parts; None:
    not told. `network` is None where this process's proxy thread moved nothing over the network: on one node, or
    where another process sends for it (PXN).
    """

    comm_id: int
    call: int
    kind: CollectiveKind
    num_bytes: int | None
    rank: int
    num_ranks: int
    algorithm: Algorithm | None
    protocol: Protocol | None
    num_channels: int | None
    num_started: int
    num_ended: int
    called_ns: int | None
    launched_ns: int
    seen_ns: int | None
    start_ns: int | None
    end_ns: int | None
    flags: ProfileFlag
    channels: tuple[ProfiledChannel, ...]
    launch: int | None = None
    network: ProfiledNetwork | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every channel reported its start and its end."""
        return ProfileFlag.INCOMPLETE not in self.flags

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph launched it; each replay is a collective of its own."""
        return ProfileFlag.CAPTURED in self.flags

    @property
    def duration_s(self) -> float | None:
        """From the first channel's start to the last one's end on the GPU; None unless complete."""
        if self.start_ns is None or self.end_ns is None or not self.is_complete:
            return None
        return (self.end_ns - self.start_ns) * NS


@dataclass(frozen=True, slots=True)
class ProfileLog:
    """Entries in the order of their ends; `num_lost` older ones were overwritten."""

    communicators: tuple[ProfiledCommunicator, ...]
    collectives: tuple[ProfiledCollective, ...]
    num_lost: int


def is_profile(path: Path) -> bool:
    """Whether a file begins as a profile does, of whatever version."""
    return starts_with(path, layout.PROFILE_MAGIC.to_bytes(8, "little"))


def read_profile(path: Path) -> ProfileLog:
    """The ring in a file, also while a process still writes it: entries under way are left out.

    Raises:
        TableError: if the file is not a profile of this version.
    """
    return read_ring(path, _FORMAT)


def _log_of(entries: NDArray[np.void], num_lost: int) -> ProfileLog:
    communicators: list[ProfiledCommunicator] = []
    collectives: list[tuple[np.void, list[ProfiledChannel]]] = []
    by_call: dict[tuple[int, int, int, int], list[ProfiledChannel]] = {}
    for entry in entries:
        match ProfileEvent(int(entry["event"])):
            case ProfileEvent.COMMUNICATOR:
                communicators.append(_communicator(entry))
            case ProfileEvent.COLLECTIVE:
                channels: list[ProfiledChannel] = []
                by_call[_call_of(entry)] = channels
                collectives.append((entry, channels))
            case ProfileEvent.CHANNEL:
                # Without its collective where that was overwritten, or taken just before.
                by_call.get(_call_of(entry), []).append(_channel(entry))
    ended = tuple(_collective(entry, channels) for entry, channels in collectives)
    return ProfileLog(tuple(communicators), ended, num_lost)


def _call_of(entry: np.void) -> tuple[int, int, int, int]:
    return int(entry["comm_id"]), int(entry["rank"]), int(entry["kind"]), int(entry["call"])


def _communicator(entry: np.void) -> ProfiledCommunicator:
    return ProfiledCommunicator(
        comm_id=int(entry["comm_id"]),
        rank=int(entry["rank"]),
        num_ranks=int(entry["num_ranks"]),
        num_nodes=int(entry["num_nodes"]),
        abi_version=int(entry["abi_version"]),
    )


def _channel(entry: np.void) -> ProfiledChannel:
    return ProfiledChannel(channel=int(entry["channel"]), start_ns=int(entry["start_ns"]), end_ns=int(entry["end_ns"]))


def _collective(entry: np.void, channels: list[ProfiledChannel]) -> ProfiledCollective:
    algorithm, protocol = int(entry["algorithm"]), int(entry["protocol"])
    return ProfiledCollective(
        comm_id=int(entry["comm_id"]),
        call=int(entry["call"]),
        kind=layout.KINDS[int(entry["kind"])],
        num_bytes=int(entry["num_bytes"]) or None,
        rank=int(entry["rank"]),
        num_ranks=int(entry["num_ranks"]),
        algorithm=layout.ALGORITHMS[algorithm] if algorithm >= 0 else None,
        protocol=layout.PROTOCOLS[protocol] if protocol >= 0 else None,
        num_channels=int(entry["num_channels"]) or None,
        num_started=int(entry["num_started"]),
        num_ended=int(entry["num_ended"]),
        called_ns=int(entry["called_ns"]) or None,
        launched_ns=int(entry["launched_ns"]),
        seen_ns=int(entry["seen_ns"]) or None,
        start_ns=int(entry["start_ns"]) or None,
        end_ns=int(entry["end_ns"]) or None,
        flags=ProfileFlag(int(entry["flags"])),
        channels=tuple(channels),
        launch=int(entry["launch"]) or None,
        network=_network(entry) if entry["network_start_ns"] else None,
    )


def _network(entry: np.void) -> ProfiledNetwork:
    return ProfiledNetwork(
        num_sends=int(entry["num_sends"]),
        num_receipts=int(entry["num_receipts"]),
        sent_bytes=int(entry["sent_bytes"]),
        received_bytes=int(entry["received_bytes"]),
        send_gpu_wait_s=int(entry["send_gpu_ns"]) * NS,
        send_peer_wait_s=int(entry["send_peer_ns"]) * NS,
        send_network_s=int(entry["send_network_ns"]) * NS,
        receive_network_s=int(entry["receive_network_ns"]) * NS,
        receive_flush_s=int(entry["receive_flush_ns"]) * NS,
        receive_gpu_wait_s=int(entry["receive_gpu_ns"]) * NS,
        busy_s=int(entry["network_busy_ns"]) * NS,
        start_ns=int(entry["network_start_ns"]),
        end_ns=int(entry["network_end_ns"]),
    )


_FORMAT: Final = RingFormat("profile", layout.PROFILE_MAGIC, layout.PROFILE_VERSION, layout.PROFILE_ENTRY, _log_of)


class ProfileRing(RingFile[ProfileLog]):
    """The profiler plug-in's ring while it is written; collectives that have not ended come in a later `take`."""

    def __init__(self, path: Path, flush: Callable[[], None] = lambda: None) -> None:
        super().__init__(path, _FORMAT, flush)
