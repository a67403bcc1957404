"""Our tuner plug-in in a real NCCL, in this process: a setting put in force from memory, run, checked and read back.

Three witnesses show what ran: the grids of the kernels in torch's profiler, NCCL's own log, and the plug-in's record.
Times are between CUDA events on the first rank's stream, queued while the streams are held back, so that they contain
no host time.
"""

import itertools
import json
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from statistics import median
from typing import Final

import torch

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.engines.nccl.base import Facts, Reading
from lagom_overlap.engines.nccl.cases import USUAL, divisible
from lagom_overlap.engines.nccl.library import FIRST_WITH_SHARED_GPUS, NcclLibrary
from lagom_overlap.engines.nccl.local_ranks import Buffers, LocalRanks, make_buffers, poison, wrong_rank
from lagom_overlap.errors import BackendError
from lagom_overlap.nccl_plugin.channel_limit import EVEN_GATHERS_ONLY
from lagom_overlap.nccl_plugin.library import TunerPlugin, installed_library
from lagom_overlap.nccl_plugin.record_log import Implementation, RecordLog, RecordRing
from lagom_overlap.nccl_plugin.space import CHANNELS
from lagom_overlap.nccl_plugin.support import tuner_version
from lagom_overlap.nccl_plugin.table_layout import MAX_CHANNELS
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator, encode_table
from lagom_overlap.nccl_plugin.tuning_log import TuningLog, read_tuning
from lagom_overlap.units import KIB, MIB, MS

NUM_TIMED: Final = 8
"""Timed calls of a setting, of which the median counts. Chosen, not measured."""
SMALL_BYTES: Final = 4 * KIB
"""A call so small that its time is the host's."""
HEAD_START_CYCLES: Final = 3_000_000
"""How long the streams are held back before timed calls: about 1.5 ms, more than the host needs to queue them."""
SHARED_GPU: Final = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC", "NCCL_NVLS_ENABLE": "0"}
"""What several ranks on one GPU need; none of it chooses an algorithm, a protocol, channels or chunks."""
_RESIDENT_SPARE: Final = 4
"""SMs left out of the channels of ranks that share a GPU, whose blocks must all be resident. Chosen, not measured."""
_NUM_SMALL: Final = 50
"""Small calls whose host time is averaged. Chosen, not measured."""
SWAP_BYTES: Final = 16 * MIB
"""Size of the calls during which tables are swapped. Chosen, not measured."""
SWAPS_IN_FLIGHT: Final = 4
"""Swaps between two checks of a result. Chosen, not measured."""


def usable_gpus(requested: int | None, ranks_per_gpu: int) -> int:
    """How many GPUs take part; None: all that torch can use.

    Raises:
        BackendError: if the machine has fewer, or there would be one rank only.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_gpus = available if requested is None else requested
    if not available:
        raise BackendError("this machine has no NVIDIA GPU that torch can use; the self-test of NCCL needs one")
    if num_gpus > available:
        raise BackendError(f"--gpus {num_gpus}: this machine has {available}")
    if num_gpus * ranks_per_gpu < 2:
        raise BackendError("a collective needs two ranks; on one GPU ask for --ranks-per-gpu 2 (NCCL 2.30.3 or later)")
    return num_gpus


class PluginBench:
    """Implements `CollectiveBench` and `TrafficBench` on the GPUs of this box."""

    def __init__(self, out: Path, *, num_gpus: int, ranks_per_gpu: int, library: Path | None) -> None:
        """Connects the ranks; `out` takes NCCL's log and the plug-in's record.

        Raises:
            BackendError: if NCCL cannot do what is asked.
        """
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        log_path, record = out / f"nccl.{os.getpid()}.log", out / "record.bin"
        self._prepare(log_path, record, num_sms, ranks_per_gpu)
        nccl = NcclLibrary(library)
        if ranks_per_gpu > 1 and nccl.version < FIRST_WITH_SHARED_GPUS:
            raise BackendError(
                f"NCCL {'.'.join(map(str, nccl.version))} puts no two ranks on one GPU; 2.30.3 does (--library PATH)"
            )
        if tuner_version(nccl.version) is None:
            raise BackendError(f"NCCL {'.'.join(map(str, nccl.version))} takes no tuner plug-in; 2.21 or later does")
        self.ranks = LocalRanks(nccl, num_gpus=num_gpus, ranks_per_gpu=ranks_per_gpu)
        if not record.exists():
            raise BackendError("NCCL did not load the tuner plug-in: its log is " + str(log_path))
        self._plugin, self._generation = TunerPlugin(installed_library()), 0
        self._ring, self._log = RecordRing(record, self._plugin.flush_record), _LogTail(log_path)
        self._name = CommunicatorId(description="selftest", ranks=tuple(range(len(self.ranks.devices))))
        self._buffers: dict[tuple[CollectiveKind, int], Buffers] = {}
        communicators, log = self._ring.take().communicators, self._log.take()
        self.facts = Facts(
            gpu=torch.cuda.get_device_name(0),
            num_sms=num_sms,
            num_gpus=num_gpus,
            ranks_per_gpu=ranks_per_gpu,
            nccl=nccl.version,
            torch=str(torch.__version__),
            tuner_version=communicators[0].abi_version if communicators else tuner_version(nccl.version) or 0,
            limits=log.limits[0] if log.limits else None,
        )

    @staticmethod
    def _prepare(log: Path, record: Path, num_sms: int, ranks_per_gpu: int) -> None:
        """The environment that NCCL reads once, when the library is first called."""
        os.environ |= {
            "NCCL_TUNER_PLUGIN": str(installed_library()),
            "LAGOM_RECORD": str(record),
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING",
            "NCCL_DEBUG_FILE": str(log),
            **EVEN_GATHERS_ONLY,
        }
        if ranks_per_gpu > 1:
            os.environ |= SHARED_GPU
            most = (num_sms - _RESIDENT_SPARE) // ranks_per_gpu  # all ranks' blocks must be resident at once
            if most < MAX_CHANNELS:
                os.environ.setdefault("NCCL_MAX_CTAS", str(most))

    def offered(self, kind: CollectiveKind, num_bytes: int) -> frozenset[Implementation]:
        """See `CollectiveBench`."""
        self._ring.take()
        self.set(kind, num_bytes, CommConfig())
        self.enqueue(kind, num_bytes)
        self.ranks.finish()
        decisions = self._ring.take().decisions
        if not decisions:
            raise BackendError(f"NCCL asked the plug-in nothing about {kind} of {num_bytes} bytes")
        return frozenset(decisions[-1].offered_s)

    def measure(self, kind: CollectiveKind, num_bytes: int, configs: Iterable[CommConfig]) -> Iterator[Reading]:
        """See `CollectiveBench`."""
        settings = list(configs)
        self._ring.take()
        self._log.take()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            checked = [self._checked(kind, num_bytes, config) for config in settings]
        grids = kernel_grids(profiler, num_ranks=len(self.ranks.devices), num_calls=len(settings))
        for place, (config, (is_right, log, record)) in enumerate(zip(settings, checked, strict=True)):
            self.set(kind, num_bytes, config)
            yield Reading(
                config=config,
                is_right=is_right,
                grids=grids[place] if grids else (),
                log=log,
                record=record,
                time_s=self.timed_s(kind, num_bytes),
            )

    def num_wrong(self, num_swaps: int) -> int:
        """See `TrafficBench`; each result is checked that a group of swaps may have spoilt."""
        chance = random.Random(1)
        num_bytes = divisible(SWAP_BYTES, len(self.ranks.devices))
        buffers = {kind: make_buffers(kind, num_bytes, self.ranks.devices) for kind in USUAL}
        num_spoilt = 0
        for _ in range(-(-num_swaps // SWAPS_IN_FLIGHT)):
            kind = chance.choice(USUAL)
            poison(buffers[kind])
            for _ in range(SWAPS_IN_FLIGHT):
                self.set(kind, num_bytes, CommConfig(num_channels=chance.choice(CHANNELS)))
                self.ranks.enqueue(kind, buffers[kind])
            self.ranks.finish()
            num_spoilt += wrong_rank(kind, buffers[kind]) is not None
        return num_spoilt

    def host_s(self, *, is_on: bool) -> float:
        """See `TrafficBench`."""
        kind = CollectiveKind.ALL_REDUCE
        self.set(kind, SMALL_BYTES, CommConfig(num_channels=1))
        self._plugin.enable(is_enabled=is_on)
        try:
            for _ in range(_NUM_SMALL):
                self.enqueue(kind, SMALL_BYTES)
            self.ranks.finish()
            began = time.perf_counter()
            for _ in range(_NUM_SMALL):
                self.enqueue(kind, SMALL_BYTES)
            return (time.perf_counter() - began) / _NUM_SMALL
        finally:
            self._plugin.enable(is_enabled=True)
            self.ranks.finish()

    def set(self, kind: CollectiveKind, num_bytes: int, config: CommConfig) -> None:
        """Puts one setting in force from the next call on, from memory."""
        self._generation += 1
        key = ConfigKey(communicator=self._name, kind=kind, num_bytes=num_bytes, occurrence=0)
        # No limit of ours: what NCCL makes of too large a number is what is to be learnt. It caps even gathers itself.
        members = [ProcessCommunicator(self._name, 1, MAX_CHANNELS)]
        table = encode_table(ConfigTable({key: config}), generation=self._generation, communicators=members)
        self._plugin.prepare(table.data, self._generation)
        self._plugin.commit(self._generation)

    def enqueue(self, kind: CollectiveKind, num_bytes: int) -> None:
        """One call on every rank; does not wait."""
        self.ranks.enqueue(kind, self._tensors(kind, num_bytes))

    def timed_s(self, kind: CollectiveKind, num_bytes: int) -> float:
        """Median seconds of a call, between events on the first rank's stream."""
        self._tensors(kind, num_bytes)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_TIMED + 1)]  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for stream in self.ranks.streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for i, mark in enumerate(marks):
            mark.record(self.ranks.streams[0])
            if i < NUM_TIMED:
                self.enqueue(kind, num_bytes)
        self.ranks.finish()
        return float(median(a.elapsed_time(b) * MS for a, b in itertools.pairwise(marks)))

    def _checked(self, kind: CollectiveKind, num_bytes: int, config: CommConfig) -> tuple[bool, TuningLog, RecordLog]:
        """One call into poisoned memory: whether every element is right, NCCL's lines and the plug-in's notes."""
        buffers = self._tensors(kind, num_bytes)
        self.set(kind, num_bytes, config)
        poison(buffers)
        self.ranks.enqueue(kind, buffers)
        self.ranks.finish()
        return wrong_rank(kind, buffers) is None, self._log.take(), self._ring.take()

    def _tensors(self, kind: CollectiveKind, num_bytes: int) -> Buffers:
        """The buffers of one kind and size; those of another kind or size are given back first."""
        if (kind, num_bytes) not in self._buffers:
            self._buffers.clear()
            self._buffers[kind, num_bytes] = make_buffers(kind, num_bytes, self.ranks.devices)
            for device in dict.fromkeys(self.ranks.devices):
                torch.cuda.synchronize(device)
        return self._buffers[kind, num_bytes]


class _LogTail:
    """A log that is being written, read piece by piece."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIOWrapper | None = None

    def take(self) -> TuningLog:
        """What whole lines since the last call say."""
        if self._file is None:
            if not self._path.exists():  # NCCL was told to write elsewhere, as by a file of its own settings
                return TuningLog()
            self._file = self._path.open(encoding="utf-8", errors="replace")
        return read_tuning(self._file.read().splitlines())


def kernel_grids(profiler: torch.profiler.profile, *, num_ranks: int, num_calls: int) -> list[tuple[int, ...]]:
    """The blocks of each rank's kernel, call by call; none where there are not as many kernels as ranks and calls."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    by_rank: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel" and "nccl" in event["name"].lower():
            facts = event["args"]
            by_rank[facts["device"], facts["stream"]].append((event["ts"], facts["grid"][0]))
    if len(by_rank) != num_ranks or any(len(kernels) != num_calls for kernels in by_rank.values()):
        return []
    in_order = [[blocks for _, blocks in sorted(kernels)] for kernels in by_rank.values()]
    return list(zip(*in_order, strict=True))
