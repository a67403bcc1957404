"""What NCCL's own log says of each collective: implementation, channels, clamped chunks, a communicator's limits.

Read where NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS holds TUNING (and INIT for the limits). The words are those of NCCL
2.30.7, whose log was read on an H100; a release that words a line otherwise says nothing here.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from lagom_overlap.collective import Algorithm, CollectiveKind, Protocol

_KINDS: Final = {
    "Broadcast": CollectiveKind.BROADCAST,
    "Reduce": CollectiveKind.REDUCE,
    "AllGather": CollectiveKind.ALL_GATHER,
    "ReduceScatter": CollectiveKind.REDUCE_SCATTER,
    "AllReduce": CollectiveKind.ALL_REDUCE,
}
_CALL: Final = re.compile(
    r"NCCL INFO (\w+): (\d{1,18}) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(\d{1,4})\}"
)
_CLAMP: Final = re.compile(r"NCCL INFO (\w+): tuner chunk size (\d{1,18}) exceeds buffer max (\d{1,18}), clamping")
_LIMITS: Final = re.compile(r"NCCL INFO (\d{1,4}) coll channels, (\d{1,4}) collnet channels, (\d{1,4}) nvls channels")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCall:
    """One collective as NCCL scheduled it; `num_bytes` are one rank's part where parts are gathered or scattered."""

    kind: CollectiveKind
    num_bytes: int
    algorithm: Algorithm
    protocol: Protocol
    num_channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedClamp:
    """A chunk that a tuner asked for, and the largest that the buffer holds, which ran in its place."""

    kind: CollectiveKind
    asked_bytes: int
    kept_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedLimits:
    """The channels that a communicator has for collectives, and of them for NVLS."""

    num_channels: int
    num_nvls_channels: int


@dataclass(frozen=True, slots=True)
class TuningLog:
    """What some lines of a log say, in their order."""

    calls: tuple[LoggedCall, ...] = ()
    clamps: tuple[LoggedClamp, ...] = ()
    limits: tuple[LoggedLimits, ...] = ()


def read_tuning(lines: Iterable[str]) -> TuningLog:
    """What the lines say; lines about other things, damaged or worded otherwise are passed over."""
    calls, clamps, limits = [], [], []
    for line in lines:
        if (call := _call(line)) is not None:
            calls.append(call)
        elif (match := _CLAMP.search(line)) and match[1] in _KINDS:
            clamps.append(LoggedClamp(kind=_KINDS[match[1]], asked_bytes=int(match[2]), kept_bytes=int(match[3])))
        elif match := _LIMITS.search(line):
            limits.append(LoggedLimits(num_channels=int(match[1]), num_nvls_channels=int(match[3])))
    return TuningLog(tuple(calls), tuple(clamps), tuple(limits))


def _call(line: str) -> LoggedCall | None:
    match = _CALL.search(line)
    if match is None or match[1] not in _KINDS:
        return None
    try:
        algorithm, protocol = Algorithm(match[3].lower()), Protocol(match[4].lower())
    except ValueError:
        return None
    first, last = int(match[5]), int(match[6])
    if last < first:
        return None
    return LoggedCall(
        kind=_KINDS[match[1]],
        num_bytes=int(match[2]),
        algorithm=algorithm,
        protocol=protocol,
        num_channels=last - first + 1,
    )
