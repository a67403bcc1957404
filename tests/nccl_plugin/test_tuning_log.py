"""Lines of NCCL 2.30.7's log from an H100 (2026-11-22), and lines that are none."""

from lagom_overlap.collective import Algorithm, CollectiveKind, Protocol
from lagom_overlap.nccl_plugin.tuning_log import LoggedCall, LoggedClamp, LoggedLimits, TuningLog, read_tuning
from lagom_overlap.units import KIB, MIB

LOG = """\
vm:475:485 [0] NCCL INFO 64 coll channels, 64 collnet channels, 0 nvls channels, 64 p2p channels
vm:475:493 [0] NCCL INFO Connected all rings, use ring PXN 0 GDR 1
vm:475:475 [0] NCCL INFO AllGather: 524288 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..63}
vm:475:475 [0] NCCL INFO AllGather: 524288 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..0}
vm:475:475 [0] NCCL INFO AllReduce: tuner chunk size 2097152 exceeds buffer max 524288, clamping
vm:475:475 [0] NCCL INFO AllReduce: 16777216 Bytes -> Algo TREE proto SIMPLE channel{Lo..Hi}={0..7}
"""


def test_calls_clamps_and_limits_of_a_real_log_are_read() -> None:
    found = read_tuning(LOG.splitlines())
    assert found.calls == (
        LoggedCall(
            kind=CollectiveKind.ALL_GATHER,
            num_bytes=512 * KIB,
            algorithm=Algorithm.RING,
            protocol=Protocol.LL,
            num_channels=64,
        ),
        LoggedCall(
            kind=CollectiveKind.ALL_GATHER,
            num_bytes=512 * KIB,
            algorithm=Algorithm.RING,
            protocol=Protocol.LL128,
            num_channels=1,
        ),
        LoggedCall(
            kind=CollectiveKind.ALL_REDUCE,
            num_bytes=16 * MIB,
            algorithm=Algorithm.TREE,
            protocol=Protocol.SIMPLE,
            num_channels=8,
        ),
    )
    assert found.clamps == (LoggedClamp(kind=CollectiveKind.ALL_REDUCE, asked_bytes=2 * MIB, kept_bytes=512 * KIB),)
    assert found.limits == (LoggedLimits(num_channels=64, num_nvls_channels=0),)


def test_lines_that_are_cut_or_worded_otherwise_say_nothing() -> None:
    lines = [
        "vm:475:475 [0] NCCL INFO AllGather: 524288 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..",
        "vm:475:475 [0] NCCL INFO AllGather: 524288 Bytes -> Algo 1 proto 2 time 12.3",
        "vm:475:475 [0] NCCL INFO AllGather: 524288 Bytes -> Algo SPIRAL proto LL channel{Lo..Hi}={0..1}",
        "vm:475:475 [0] NCCL INFO Gossip: 524288 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}",
        "vm:475:475 [0] NCCL INFO AllGather: 524288 Bytes -> Algo RING proto LL channel{Lo..Hi}={5..1}",
        "",
    ]
    assert read_tuning(lines) == TuningLog()
