"""How long a collective takes at a configuration: a smooth curve with few constants, fitted to all collectives at once.

Form (spec, contention model, section 1, with its sharpness m left free), W wire bytes, NC channels, C bytes of chunk:

    x = L + (W + fill min(W, NC C)) / R
    s = NC / r (C / (C + C0))^q        channels over those that would fill the link; the cost per chunk
    R = B s / (1 + s^m)^(1/m) exp(-p NC)

Here are the constants and what is believed of them; the curve itself is `predict_wire` in csrc/lagom_search_wire.c.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, sqrt
from typing import Final

import numpy as np

from lagom_overlap.collective import Protocol, Transport
from lagom_overlap.tune.just_enough.lattice import Floats, Implementation, Lattice
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


USUAL_CHUNK: Final = 256 * KIB
"""Where the engine lets nobody choose."""
HALF_CHUNK: Final = 0.86
"""C0 over the middle of the chunks that a space offers, which are what its engine can make use of."""
LN_LINK: Final = {Protocol.LL: log(0.5), Protocol.LL128: log(0.93)}
"""Share of the link that a protocol's flags leave to data (spec, contention model, section 1)."""
LN_HALF_CHUNK: Final = {Protocol.LL: log(0.25), Protocol.LL128: log(0.25)}
"""LL and LL128 carry flags with the data: no synchronisation per slice, so small chunks cost less (a guess)."""
LN_COPY_CHANNEL: Final = log(16.0)
"""Copy engines are one place with one channel, which nearly fills the link."""
KIND_SD: Final = [0.12, 0.4, 0.7, 0.5]


def _kind_prior(kind: Implementation, first: Implementation) -> list[float]:
    """What a change of implementation does before anything is measured: the protocol counts, and a lack of channels."""
    (_, new, way), (_, old, first_way) = kind, first

    def change(table: Mapping[Protocol, float]) -> float:
        return (table.get(new, 0.0) if new else 0.0) - (table.get(old, 0.0) if old else 0.0)

    copies = (way is Transport.COPY_ENGINE) - (first_way is Transport.COPY_ENGINE)
    return [change(LN_LINK), 0.5 * change(LN_LINK) + copies * LN_COPY_CHANNEL, change(LN_HALF_CHUNK), 0.0]


def wire_prior(lattice: Lattice, wire_bytes: Floats, default_comm_s: Floats) -> Prior:
    """What is believed before any fit, from the default's own times."""
    least, most = float(lattice.chunk_bytes.min()), float(lattice.chunk_bytes.max())
    middle = sqrt(least * most) if most > 1 else USUAL_CHUNK
    rate = float(wire_bytes.sum() / max(default_comm_s.sum(), 1e-12))
    mean = [log(1.4 * rate), log(5.0), log(HALF_CHUNK * middle), log(0.03 * float(default_comm_s.mean()) + 1e-9)]
    mean += [log(1.4), log(0.75), log(0.1), 0.002]
    sd = [0.4, 0.6, 0.8, 1.0, 0.3, 0.3, 0.5, 0.002]
    for kind in lattice.kinds[1:]:
        mean += _kind_prior(kind, lattice.kinds[0])
        sd += KIND_SD
    return Prior(np.array(mean), np.array(sd))
