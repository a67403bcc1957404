"""What the cost model estimates where a trace measures nothing: a value, apart from the model that fills it."""

from dataclasses import dataclass
from typing import Final

from lagom_overlap.trace.gpu_trace import NS_PER_S
from lagom_overlap.units import format_seconds

PROFILE: Final = "plausible"


@dataclass(frozen=True, slots=True, kw_only=True)
class FillIn:
    """What the cost model estimates of runs that have no twin; `left_ns` is what it cannot estimate either.

    `run_ns` is their length as it is, `alone_ns` as estimated alone; times summed over all ranks.
    """

    num_runs: int
    run_ns: int
    alone_ns: float
    left_ns: int
    profile: str = PROFILE

    @classmethod
    def nothing(cls) -> "FillIn":
        """Of a trace in which every overlapped kernel has its twin."""
        return cls(num_runs=0, run_ns=0, alone_ns=0.0, left_ns=0)

    @property
    def stretched_ns(self) -> float:
        """Estimated extra time during collectives."""
        return self.run_ns - self.alone_ns

    @property
    def sentences(self) -> tuple[str, ...]:
        """One sentence that says what is estimated, not measured; none where nothing is."""
        if not self.num_runs:
            return ()
        return (
            f"{self.num_runs} kernel runs during collectives ({format_seconds(self.run_ns / NS_PER_S)}) have no "
            f"uncontended twin: the cost model (profile {self.profile}) estimates that "
            f"{format_seconds(self.stretched_ns / NS_PER_S)} of it is stretch; this is no measurement",
        )
