"""A box without GPUs that answers as the H100 did on 2026-11-22, for the self-test's driver."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, Protocol
from lagom_overlap.cost.measured_surface import InjectorSetting, Point, TimeSpread
from lagom_overlap.engines.nccl.base import Benches, Facts, Reading
from lagom_overlap.nccl_plugin.box import Box
from lagom_overlap.nccl_plugin.record_log import Implementation, RecordedChunk, RecordLog
from lagom_overlap.nccl_plugin.tuning_log import LoggedCall, LoggedClamp, LoggedLimits, TuningLog
from lagom_overlap.units import KIB, MIB
from lagom_overlap.verbs.selftest import SelfTestRequest

BOX = Box(gpu="NVIDIA H100 80GB HBM3", num_gpus=1, topology="0123456789abcdef")
GRAINS = {Protocol.LL: 16, Protocol.LL128: 1920, Protocol.SIMPLE: 512}
RINGS = frozenset((Algorithm.RING, protocol) for protocol in Protocol)
TREES = frozenset((Algorithm.TREE, protocol) for protocol in Protocol)


class StandInBench:
    """NCCL 2.30.7 with 24 channels: clamps a tree's Simple chunk to 512 KiB; `wrong` names what it gets wrong."""

    def __init__(self, wrong: Callable[[CommConfig], bool] = lambda _: False) -> None:
        self.facts = Facts(
            gpu=BOX.gpu,
            num_sms=132,
            num_gpus=1,
            ranks_per_gpu=2,
            nccl=(2, 30, 7),
            torch="2.11.0",
            tuner_version=6,
            limits=LoggedLimits(num_channels=24, num_nvls_channels=0),
        )
        self._wrong = wrong
        self.num_wrong_swaps = 0

    def offered(self, kind: CollectiveKind, num_bytes: int) -> frozenset[Implementation]:
        return RINGS | TREES if kind is CollectiveKind.ALL_REDUCE else RINGS

    def measure(self, kind: CollectiveKind, num_bytes: int, configs: Iterable[CommConfig]) -> Iterator[Reading]:
        for config in configs:
            algorithm, protocol = config.algorithm or Algorithm.RING, config.protocol or Protocol.SIMPLE
            channels = min(24, config.num_channels or 24)
            clamps: tuple[LoggedClamp, ...] = ()
            most = 512 * KIB if (algorithm, protocol) == (Algorithm.TREE, Protocol.SIMPLE) else 2 * MIB
            chunk = config.chunk_bytes or most
            if chunk > most:
                clamps = (LoggedClamp(kind=kind, asked_bytes=chunk, kept_bytes=most),)
            yield Reading(
                config=config,
                is_right=not self._wrong(config),
                grids=(channels, channels),
                log=TuningLog(
                    calls=(
                        LoggedCall(
                            kind=kind,
                            num_bytes=num_bytes,
                            algorithm=algorithm,
                            protocol=protocol,
                            num_channels=channels,
                        ),
                    ),
                    clamps=clamps,
                ),
                record=RecordLog(
                    communicators=(),
                    decisions=(),
                    chunks=(
                        RecordedChunk(
                            comm_id=1,
                            step=1,
                            kind=kind,
                            num_bytes=num_bytes,
                            algorithm=algorithm,
                            protocol=protocol,
                            offered_bytes=most,
                            chunk_bytes=chunk - chunk % GRAINS[protocol],
                        ),
                    ),
                    num_lost=0,
                ),
                time_s=num_bytes / (1e9 * channels),
            )

    def num_wrong(self, num_swaps: int) -> int:
        return self.num_wrong_swaps

    def host_s(self, *, is_on: bool) -> float:
        return 34.2e-6 if is_on else 34.0e-6


class StandInContention:
    """A GEMM that loses two SMs of 132 per channel."""

    def point(self, kind: CollectiveKind, num_channels: int) -> Point:
        alone, slow = 200e-6, 200e-6 * 132 / (132 - 2 * num_channels)
        return Point.build(
            "nccl",
            "gemm_cublas_4096x4096x4096",
            InjectorSetting(injector=kind, num_channels=num_channels, num_ranks=2, message_bytes=256 * MIB),
            during=TimeSpread.of([slow, slow]),
            solo=TimeSpread.of([alone, alone]),
            covered=True,
            num_repeats=2,
            num_launches=8,
        )


def stand_in(bench: StandInBench | None = None) -> Callable[[SelfTestRequest], Callable[[Path], Benches]]:
    """Opens the stand-in in place of this machine's GPUs."""
    mine = bench or StandInBench()
    return lambda _request: lambda _folder: Benches(mine, mine, StandInContention())
