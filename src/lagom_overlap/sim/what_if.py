"""Whether a change is worth making: its predicted gain or loss, and how far the model itself may be off.

The interval is the gain plus and minus what the model was measured to miss, on data that it was not fitted to
(docs/accuracy.md): `SLOWDOWN_ERROR` of the computation that runs during communication, and `COLLECTIVE_ERROR` of the
communication that nothing hides, before or after the change, whichever is more; what else
it is known to miss of a change comes on top (`more_error`). A difference of two predictions is
better than either where the same error is in both; nothing measured says by how much, so nothing is taken off.

A change is a gain or a loss only where it is more than that and more than `LEAST` of the step. Anything smaller than
`LEAST` is no gain, whatever its interval: steps of one and the same job differ by more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from lagom_overlap.collective import Protocol
from lagom_overlap.units import format_percent

SLOWDOWN_ERROR: Final = 0.033
"""Model error of a kernel's time next to a collective, as a share: 3.3% on the H100's surface with victims left out
(5.4% on the MI300X with shapes left out)."""
COLLECTIVE_ERROR: Final = 0.087
"""Model error of a collective's time next to a kernel, as a share: MI300X with shapes left out. No measured surface
gives it for NVIDIA's GPUs."""
QUEUE_ERROR: Final = 0.25
"""Model error of the gain when a pipeline's transfers stop sharing one queue: 87 ms predicted, 109 ms in the one
emulated step that was compared."""
LEAST: Final = 0.005
"""The smallest error of a predicted step, as a share: NVIDIA's tables that repeat a configuration differ by 1 to 6%
(NeMo 24.07)."""


MOST_CHANNELS: Final = (16, 8, 4, 2)
"""Channel caps that are tried."""
PROTOCOLS: Final = (Protocol.SIMPLE, Protocol.LL128)
"""Protocols that are tried; LL is left out because it reaches only half of the link's bandwidth."""


@dataclass(frozen=True, slots=True)
class AskedChange:
    """A change that a job or a trace is asked after: its name, the line that makes it, and what one would set.

    `setting` is a table and key of the job file, or an environment variable.
    """

    change: str
    apply: str
    setting: str = ""

    @classmethod
    def channels(cls, most: int) -> "AskedChange":
        """Every collective capped."""
        line = f"NCCL_MAX_CTAS={most}, or max_ctas = {most} in the options of one process group"
        return cls(f"at most {most} channels", line, f"NCCL_MAX_CTAS={most}")

    @classmethod
    def protocol(cls, protocol: Protocol) -> "AskedChange":
        """Another protocol wherever the engine has it."""
        line = f"NCCL_PROTO={protocol.upper()}; lagom tune decides it by collective"
        return cls(f"protocol {protocol.upper()}", line, f"NCCL_PROTO={protocol.upper()}")


COPY_ENGINES: Final = AskedChange(
    "copy-engine collectives (no CTA)",
    "NCCL_CTA_POLICY=2 with symmetric buffers; FSDP2: model.set_symm_mem_for_comm('NCCL')",
    "NCCL_CTA_POLICY=2",
)


class GainEstimate(StrEnum):
    """The answer to one change."""

    GAIN = "gain"
    LOSS = "loss"
    NO_GAIN = "no gain"
    WITHIN_ERROR = "within the model's error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """A step by the model in seconds: all of it, computation during communication, communication that shows."""

    step_s: float
    overlapped_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change and what it is predicted to do to a step: `gain_s` is negative where it loses.

    `low_s` and `high_s` bound the gain by the model's own error, `more_error` names what is in it besides the errors of
    every change; `share` is the gain over the step. `apply` is the line that makes the change, `setting` the key of the
    job file or the variable in it.
    """

    change: str
    apply: str
    setting: str = ""
    gain_s: float
    low_s: float
    high_s: float
    share: float
    verdict: GainEstimate
    more_error: str = ""


def errors_text(answers: Sequence[WhatIf]) -> str:
    """What the intervals hold, in words."""
    more = dict.fromkeys(answer.more_error for answer in answers if answer.more_error)
    errors = [
        f"{format_percent(SLOWDOWN_ERROR)} of the computation that runs during communication",
        f"{format_percent(COLLECTIVE_ERROR)} of the exposed communication",
        *more,
    ]
    return f"{', '.join(errors[:-1])} and {errors[-1]}"


def error_s(before: Spent, after: Spent) -> float:
    """How far the difference of two predicted steps may be off."""
    overlapped = max(before.overlapped_s, after.overlapped_s)
    exposed = max(before.exposed_s, after.exposed_s)
    return SLOWDOWN_ERROR * overlapped + COLLECTIVE_ERROR * exposed


def what_if(
    change: AskedChange, before: Spent, after: Spent, *, more_error_s: float = 0.0, more_error: str = ""
) -> WhatIf:
    """The answer to a change; `more_error_s` is what else is known of the model's error here, and what it is of."""
    gain_s = before.step_s - after.step_s
    unsure_s = error_s(before, after) + more_error_s
    share = gain_s / before.step_s
    if abs(share) < LEAST:
        verdict = GainEstimate.NO_GAIN
    elif abs(gain_s) <= unsure_s:
        verdict = GainEstimate.WITHIN_ERROR
    else:
        verdict = GainEstimate.GAIN if gain_s > 0 else GainEstimate.LOSS
    return WhatIf(
        change=change.change,
        apply=change.apply,
        setting=change.setting,
        gain_s=gain_s,
        low_s=gain_s - unsure_s,
        high_s=gain_s + unsure_s,
        share=share,
        verdict=verdict,
        more_error=more_error,
    )


def best_first(answers: Sequence[WhatIf]) -> tuple[WhatIf, ...]:
    """The answers by predicted gain, the largest first."""
    return tuple(sorted(answers, key=lambda answer: (-answer.gain_s, answer.change)))


def whether(answers: Sequence[WhatIf]) -> str:
    """The answer to all of them in one sentence, "" where nothing was asked."""
    if not answers:
        return ""
    ordered = best_first(answers)
    gains = [answer for answer in ordered if answer.verdict is GainEstimate.GAIN]
    if gains:
        return f"Worth trying: {gains[0].change}, {gain_text(gains[0])}."
    best = ordered[0]
    tried = f'the best of {len(ordered)} changes, "{best.change}", is predicted to give {gain_text(best)}'
    if best.verdict is GainEstimate.WITHIN_ERROR and best.gain_s > 0:
        return f"No gain that the model can tell from its own error: {tried}."
    return f"No change is predicted to pay: {tried}."


def gain_text(answer: WhatIf) -> str:
    """A gain as a share of the step before, with its interval."""
    return f"{format_percent(answer.share, signed=True)} of the step ({interval_text(answer)})"


def interval_text(answer: WhatIf) -> str:
    """The interval of a gain as shares of the step."""
    scale = answer.share / answer.gain_s if answer.gain_s else 0.0
    if not scale:
        return "0 %"
    return (
        f"{format_percent(answer.low_s * scale, signed=True)} to {format_percent(answer.high_s * scale, signed=True)}"
    )
