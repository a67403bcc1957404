"""One change that a trace gives reason for, and the words that all rules share."""

from dataclasses import dataclass

from lagom_overlap.analysis.collectives import CollectiveKey
from lagom_overlap.analysis.contention import Slowdown
from lagom_overlap.analysis.findings import Findings
from lagom_overlap.trace.gpu_trace import NS_PER_S
from lagom_overlap.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change: what, the line to apply, why, and what it may gain per step of the average rank.

    `change` is what the model is asked of it (`AskedChange`), "" where it cannot be.
    """

    rule: str
    what: str
    apply: str
    evidence: str
    predicted_gain_s: float
    change: str = ""


def describe(key: CollectiveKey) -> str:
    """A collective for people: `"all_gather of 64 MiB on fsdp (8 channels)"`."""
    size = f" of {format_bytes(key.num_bytes)}" if key.num_bytes else ""
    channels = f" ({key.num_channels} channels)" if key.num_channels else ""
    return f"{key.op}{size} on {key.communicator}{channels}"


def nccl_version(text: str) -> tuple[int, int] | None:
    """(major, minor) of `"2.27.5"`; None where the trace does not say."""
    parts = text.split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 and all(p.isdecimal() for p in parts[:2]) else None


def version_of(findings: Findings) -> tuple[int, int] | None:
    """NCCL's version, from the first rank that says it."""
    return next((v for rank in findings.ranks if (v := nccl_version(rank.trace.nccl_version)) is not None), None)


def per_step_s(findings: Findings, length_ns: float) -> float:
    """Seconds per step of the average rank."""
    return length_ns / NS_PER_S / findings.num_windows


def per_step(findings: Findings, length_ns: float) -> str:
    """The same in words."""
    return f"{format_seconds(per_step_s(findings, length_ns))} per step"


def stretch(slowdown: Slowdown) -> str:
    """How much longer kernels take, in words."""
    interval = (
        f" ({slowdown.low:.2f}-{slowdown.high:.2f})" if slowdown.low is not None and slowdown.high is not None else ""
    )
    return f"{slowdown.slowdown:.2f} times as long{interval}"
