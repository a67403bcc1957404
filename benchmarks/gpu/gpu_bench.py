"""The bench that times on the GPU: a victim's graph during a stand-in or a pair of NCCL ranks."""

import platform
import subprocess
from pathlib import Path

import pynvml
import torch
from bench import Reading
from nccl_pair import KINDS, NcclPair, load_library
from standin import StandIn, build_library
from victims import Victim, VictimSpec, all_specs

from lagom_overlap.collective import CollectiveKind
from lagom_overlap.cost.measured_surface import InjectorSetting


class GpuBench:
    """Keeps the last victim's graph and the last injector, and makes others on demand."""

    def __init__(self, out: Path, nccl_library: Path | None, num_victims: int | None) -> None:
        self._standin_library = build_library(out)
        self._nccl = load_library(nccl_library) if nccl_library else None
        self._specs: dict[str, VictimSpec] = {spec.name: spec for spec in all_specs()[:num_victims]}
        self.names = list(self._specs)
        self._victims: dict[str, Victim] = {}
        self._setting: InjectorSetting | None = None
        self._injector: StandIn | NcclPair | None = None
        self._stream = torch.cuda.Stream(priority=-1)
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByIndex(0)

    def prepare(self, victim: str, setting: InjectorSetting) -> int:
        """Make both ready; the victims stay in memory, the injector changes with its setting."""
        if victim not in self._victims:
            self._victims[victim] = Victim(self._specs[victim])
        self._victim = self._victims[victim]
        if setting != self._setting:
            if isinstance(self._injector, NcclPair):
                self._injector.close()
            self._injector, self._setting = None, None  # frees its buffers first
            self._injector = self._make(setting)
            self._setting = setting
        if isinstance(self._injector, NcclPair):
            self._injector.cover(self.solo() * self._victim.num_launches)
        return self._victim.num_launches

    def solo(self) -> float:
        """Seconds per launch of the victim alone."""
        self._victim.run(self._start, self._end)
        return self._per_launch_s()

    def during(self) -> Reading:
        """One batch of the victim during the injector, which is resident before the victim starts."""
        injector = self._injector
        assert injector is not None
        injector.start()
        self._victim.run(self._start, self._end)
        injector.stop_after(self._victim.stream)
        during_s = self._per_launch_s()
        cover = injector.finish(self._end)
        return Reading(
            during_s=during_s,
            covered=cover.covered,
            injector_bytes_per_s=cover.bytes_per_s,
            num_held_sms=cover.num_held_sms,
        )

    def sm_clock_hz(self) -> float:
        """The SM clock now, just after the point's last batch."""
        return pynvml.nvmlDeviceGetClockInfo(self._device, pynvml.NVML_CLOCK_SM) * 1e6  # MHz

    def machine(self) -> dict[str, str]:
        """Versions and what the card is."""
        properties = torch.cuda.get_device_properties(0)
        nvcc = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
        return {
            "gpu": properties.name,
            "num_sms": str(properties.multi_processor_count),
            "l2_bytes": str(properties.L2_cache_size),
            "memory_bytes": str(properties.total_memory),
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "cuda": str(torch.version.cuda),
            "nvcc": nvcc.strip().splitlines()[-1],
            "torch": torch.__version__,
            "nccl": ".".join(map(str, self._nccl.version)) if self._nccl else "not loaded",
            "python": platform.python_version(),
        }

    def victim_facts(self) -> dict[str, dict[str, str]]:
        """The kernels of each victim and the error of its result; makes every victim."""
        facts = {}
        for name, spec in self._specs.items():
            victim = self._victims.setdefault(name, Victim(spec))
            facts[name] = victim.kernels | {"relative_error": f"{victim.error:.2e}"}
        return facts

    def _make(self, setting: InjectorSetting) -> StandIn | NcclPair:
        if setting.injector not in KINDS:
            return StandIn(self._standin_library, setting, self._stream)
        if self._nccl is None:
            raise ValueError(f"{setting.injector} needs an NCCL library")
        return NcclPair(self._nccl, CollectiveKind(setting.injector), setting)

    def _per_launch_s(self) -> float:
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e-3 / self._victim.num_launches  # ms
