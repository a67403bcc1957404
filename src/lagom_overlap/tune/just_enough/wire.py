"""How long a collective takes at a configuration: a smooth curve with few constants, fitted to all collectives at once.

Form (spec, contention model, section 1, with its sharpness m left free), W wire bytes, NC channels, C bytes of chunk:

    x = L + (W + fill min(W, NC C)) / R
    s = NC / r (C / (C + C0))^q        channels over those that would fill the link; the cost per chunk
    R = B s / (1 + s^m)^(1/m) exp(-p NC)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Final

import numpy as np

from lagom_overlap.collective import Protocol
from lagom_overlap.tune.just_enough.lattice import Floats, Implementation, Ints
from lagom_overlap.units import KIB

NUM_SHARED: Final = 8
"""ln B, ln r, ln C0, ln L, ln m, ln q, ln fill, p."""
NUM_OF_KIND: Final = 4
"""Per further implementation: ln of its link's, channel's, C0's and latency's ratio to the first's."""


@dataclass(frozen=True, slots=True)
class Prior:
    """Independent normal distributions."""

    mean: Floats
    sd: Floats


LN_LINK: Final = {Protocol.LL: log(0.5), Protocol.LL128: log(0.93)}
"""Share of the link that a protocol's flags leave to data (spec, contention model, section 1)."""
LN_HALF_CHUNK: Final = {Protocol.LL: log(0.25), Protocol.LL128: log(0.25)}
"""LL and LL128 carry flags with the data: no synchronisation per slice, so small chunks cost less (a guess)."""
KIND_SD: Final = [0.12, 0.4, 0.7, 0.5]


def _kind_prior(kind: Implementation, first: Implementation) -> list[float]:
    """What a change of implementation does before anything is measured: only the protocol counts."""
    (_, new, _), (_, old, _) = kind, first

    def change(table: Mapping[Protocol, float]) -> float:
        return (table.get(new, 0.0) if new else 0.0) - (table.get(old, 0.0) if old else 0.0)

    return [change(LN_LINK), 0.5 * change(LN_LINK), change(LN_HALF_CHUNK), 0.0]


def wire_prior(kinds: Sequence[Implementation], wire_bytes: Floats, default_comm_s: Floats) -> Prior:
    """What is believed before any fit, from the default's own times."""
    rate = float(wire_bytes.sum() / max(default_comm_s.sum(), 1e-12))
    mean = [log(1.4 * rate), log(5.0), log(220 * KIB), log(0.03 * float(default_comm_s.mean()) + 1e-9)]
    mean += [log(1.4), log(0.75), log(0.1), 0.002]
    sd = [0.4, 0.6, 0.8, 1.0, 0.3, 0.3, 0.5, 0.002]
    for kind in kinds[1:]:
        mean += _kind_prior(kind, kinds[0])
        sd += KIND_SD
    return Prior(np.array(mean), np.array(sd))


def rates(params: Floats, channels: Floats, chunk_bytes: Floats, kind: Ints) -> Floats:
    """R in bytes per second; `params` is (..., P), the others broadcast against its leading axes plus one."""
    link, saturate, half, sharp, power, penalty = (params[..., i, None] for i in (0, 1, 2, 4, 5, 7))
    if params.shape[-1] > NUM_SHARED:
        ratios = _ratios(params, kind)
        link, half = link + ratios[0], half + ratios[2]
        saturate = saturate + ratios[0] - ratios[1]
    per_chunk = np.exp(power) * np.log1p(np.exp(half - np.log(chunk_bytes)))
    fill = np.exp(sharp) * (np.log(channels) - saturate - per_chunk)
    exponent = link - np.logaddexp(0.0, -fill) / np.exp(sharp) - penalty * channels
    return np.asarray(np.exp(exponent))


def comm_times(params: Floats, wire_bytes: Floats, channels: Floats, chunk_bytes: Floats, kind: Ints) -> Floats:
    """The times x in seconds."""
    latency = params[..., 3, None]
    if params.shape[-1] > NUM_SHARED:
        latency = latency + _ratios(params, kind)[3]
    first = np.exp(params[..., 6, None]) * np.minimum(wire_bytes, channels * chunk_bytes)
    moved = (wire_bytes + first) / rates(params, channels, chunk_bytes, kind)
    return np.asarray(np.exp(latency) + moved)


def _ratios(params: Floats, kind: Ints) -> list[Floats]:
    """The four ratios of each place's implementation, zero for the first."""
    own = params[..., NUM_SHARED:].reshape(*params.shape[:-1], -1, NUM_OF_KIND)
    padded = np.concatenate([np.zeros((*own.shape[:-2], 1, NUM_OF_KIND)), own], axis=-2)
    return [padded[..., kind, i] for i in range(NUM_OF_KIND)]
