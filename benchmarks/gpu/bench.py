"""The seam between the sweep and what times a victim: the GPU (gpu_bench.py), or closed forms without one."""

from dataclasses import dataclass
from typing import Protocol

from lagom_overlap.cost.measured_surface import InjectorSetting

NUM_SMS = 132  # H200


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One batch during the injector; times are per launch."""

    during_s: float
    covered: bool
    injector_bytes_per_s: float | None
    num_held_sms: int | None


class Bench(Protocol):
    """What can time a victim during an injector."""

    def prepare(self, victim: str, setting: InjectorSetting) -> int:
        """Make both ready; return the launches per batch."""

    def solo(self) -> float:
        """Seconds per launch, alone."""

    def during(self) -> Reading:
        """One batch during the injector."""

    def sm_clock_hz(self) -> float:
        """The SM clock now."""


class ClosedForm:
    """A bench without a GPU: each victim slows by 132 / (132 - blocks), with a small jitter, whatever the traffic."""

    SOLO_S = 1e-3

    def __init__(self) -> None:
        self._setting, self._tick = InjectorSetting(injector="none", num_channels=1), 0

    def prepare(self, victim: str, setting: InjectorSetting) -> int:
        """Remember the setting."""
        del victim
        self._setting, self._tick = setting, 0
        return 4

    def solo(self) -> float:
        """The constant solo time, with jitter."""
        return self.SOLO_S * self._jitter()

    def during(self) -> Reading:
        """The solo time stretched by the SMs lost."""
        blocks = self._setting.num_blocks
        slow = self.SOLO_S * NUM_SMS / (NUM_SMS - blocks) * self._jitter()
        return Reading(during_s=slow, covered=True, injector_bytes_per_s=0.0, num_held_sms=blocks)

    def sm_clock_hz(self) -> float:
        """A constant."""
        return 1.98e9

    def _jitter(self) -> float:
        self._tick += 1
        return 1 + 0.001 * ((self._tick // 2) % 5 - 2)  # solo and overlapped calls draw the same values
