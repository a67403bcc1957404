"""The best assignment on a forecast: exact for up to two collectives, else coordinate search with trades.

One collective's places at a time are searched, all others fixed, until none helps; then pairs are moved against each
other (one faster, one gentler), which a maximum of two sums needs to get past its ridges. Nothing is measured. The
search itself is `ls_best` in csrc/lagom_search_allocate.c.
"""

from collections.abc import Sequence
from ctypes import byref

import numpy as np

from lagom_overlap.tune.just_enough.forecast import Forecast
from lagom_overlap.tune.just_enough.lattice import Ints
from lagom_overlap.tune.just_enough.library import address


class Allocation:
    """The search over all but the `barred` places of each collective; `doubt` as in `Forecast.makespans`."""

    def __init__(self, forecast: Forecast, barred: Sequence[set[int]], doubt: float) -> None:
        self._forecast, self._barred, self._doubt = forecast, barred, doubt

    def best(self, starts: Sequence[Sequence[int]]) -> Ints | None:
        """Where the expected makespan is smallest, searched from the starts and from the best equal places.

        None without any of them.
        """
        forecast = self._forecast
        begin = np.array(starts, dtype=np.intp).reshape(len(starts), forecast.num_comms)
        found, makespan_s = np.empty(forecast.num_comms, dtype=np.intp), np.empty(1)
        mask = self._mask()
        forecast.model.run(
            "ls_best",
            *(byref(forecast.struct), None if mask is None else address(mask)),
            *(address(begin), len(begin), self._doubt, address(found), address(makespan_s)),
        )
        return found if np.isfinite(makespan_s[0]) else None

    def best_of_kind(self, kind: int) -> Ints | None:
        """The best equal places of one implementation; where a collective lacks it, None."""
        if len(self._forecast.model.sight.surfaces) > 1:
            return None
        all_barred = set().union(*self._barred)
        common = [p for p in np.flatnonzero(self._forecast.lattices[0].kind == kind).tolist() if p not in all_barred]
        if not common:
            return None
        places = np.repeat(np.array(common)[:, None], self._forecast.num_comms, axis=1)
        return np.asarray(places[int(np.argmin(self._forecast.makespans(places, self._doubt)))])

    def _mask(self) -> np.ndarray | None:
        """(N, most places): 1 where a place is barred; None if none is."""
        if not any(self._barred):
            return None
        mask = np.zeros((self._forecast.num_comms, self._forecast.model.most_places), dtype=np.uint8)
        for row, bar in zip(mask, self._barred, strict=True):
            row[list(bar)] = 1
        return mask
