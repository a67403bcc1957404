"""Which implementation (algorithm, protocol, transport): successive halving over the subspaces, judged by makespan.

Karnin, Koren and Somekh, "Almost Optimal Exploration in Multi-Armed Bandits" (ICML 2013); Jamieson and Talwalkar,
"Non-stochastic Best Arm Identification and Hyperparameter Optimization" (AISTATS 2016): every arm is measured, the
worse half is dropped, the others are measured again, until one is left. Here an arm is a contender: one implementation
(kind) for the collectives of one surface.

    theirs                        ours
    loss of an arm                the surrogate's shortest makespan with it, computations included, and how sure that
                                  is; not the collective's own time, which is AutoCCL's criterion
    a pull                        a look: a measurement of the group with kinds at their best places by the surrogate
    the worse half is dropped     of it only what, a standard deviation better than surrogate, would still not be the
                                  best: what is uncertain stays
    about n log2(n) pulls         log2(kinds) looks at most: the surrogate learns from each, and what it favours then is
                                  measured anyway

First rung: kinds never measured, unless hopeless even if better than surrogate. All x_j are seen in one measurement, so
one look deals as many kinds as there are collectives, the most promising to the largest. Later rungs: kinds of the
better half, all collectives of a surface alike, so that the computation's time is that kind's. Of two kinds one look is
all. A kind that fails before it ever ran is dropped for the collectives that could try it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, log2
from statistics import pstdev
from typing import Final

import numpy as np

from lagom_overlap.tuners.model_based.search_space import Places, SearchSpace
from lagom_overlap.tuners.model_based.surrogate import Allocation, Surrogate

HOPELESS: Final = 1.25
"""An unmeasured kind is skipped if even its optimistic makespan is this many times the best. Chosen, not measured."""
CLOSE: Final = 1.02
"""A measured kind is looked at again if its optimistic makespan is at most this many times the best. Chosen."""
NUM_DRAWS: Final = 4
"""Drawn surrogates whose spread gives the uncertainty. Bounds the computation."""

Contender = tuple[int, int]
"""A surface of the group and a kind on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is expected of a contender: its best place, the makespan there (s), the standard deviation of its logarithm.

    `is_only_place`: there is nothing to configure. `is_settled`: that place was measured, or the best so far has no
    other kind there, so that the search goes on with it anyway.
    """

    place: int
    makespan_s: float
    log_sd: float = 0.0
    is_only_place: bool = False
    is_settled: bool = False

    @property
    def optimistic_s(self) -> float:
        """The makespan, a standard deviation better than surrogate."""
        return self.makespan_s * exp(-self.log_sd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Contenders to measure at once, the most promising first; in the first rung several may share a surface."""

    contenders: tuple[Contender, ...]
    is_first_rung: bool


class Halving:
    """The contenders that are left of a group, and how many looks may still be taken."""

    def __init__(self, search_space: SearchSpace) -> None:
        self._search_space = search_space
        kinds = [np.unique(surface.lattice.kind).tolist() for surface in search_space.surfaces]
        most = max(map(len, kinds))
        self._left = {(surface, kind) for surface, held in enumerate(kinds) for kind in held}
        self._room = [int((search_space.surface_of == surface).sum()) for surface in range(len(kinds))]
        self._looked: set[Contender] = set()
        self._is_one_rung = most <= 2
        self._is_careful = False
        self.num_looks = ceil(log2(most))
        self.num_draws = 0 if self._is_one_rung else NUM_DRAWS

    def next(self, outlooks: Mapping[Contender, Outlook], best_s: float, measured: set[Contender]) -> Look | None:
        """The next look; None when it is over.

        `measured` are the contenders of which anything ran; `best_s` is the makespan of the best that was measured.
        """
        if not self.num_looks:
            return None
        held = {one: outlook for one, outlook in outlooks.items() if one in self._left}
        fresh = [one for one in held if one not in measured | self._looked and _is_promising(held[one], best_s)]
        asked = fresh
        if not fresh and not self._is_one_rung:
            self._drop_worse_half(held, best_s, measured)
            asked = [one for one in held if one in self._left & measured and not held[one].is_settled]
            asked = [one for one in asked if held[one].optimistic_s <= CLOSE * best_s]
        asked.sort(key=lambda one: (held[one].optimistic_s, one))
        room = self._room if fresh else [1] * len(self._room)
        chosen = [one for number, one in enumerate(asked) if sum(o[0] == one[0] for o in asked[:number]) < room[one[0]]]
        if not chosen:
            return None
        chosen = chosen[:1] if self._is_careful else chosen
        self._looked |= set(chosen)
        self.num_looks -= 1
        return Look(contenders=tuple(chosen), is_first_rung=bool(fresh))

    def fail(self, new: set[Contender]) -> dict[int, set[int]]:
        """Takes the contenders of a failed measurement that never ran; returns the places to bar, by collective.

        One alone cannot run. Of several nobody knows which it was: from now on they are looked at one by one.
        """
        if len(new) != 1:
            self._is_careful |= len(new) > 1
            self._looked -= new
            return {}
        self._left -= new
        ((surface, kind),) = new
        places = np.flatnonzero(self._search_space.surfaces[surface].lattice.kind == kind).tolist()
        return {int(j): set(places) for j in np.flatnonzero(self._search_space.surface_of == surface)}

    def _drop_worse_half(
        self, outlook_of: Mapping[Contender, Outlook], best_s: float, measured: set[Contender]
    ) -> None:
        for surface in range(len(self._room)):
            rung = sorted(
                (outlook_of[one].makespan_s, one) for one in outlook_of if one[0] == surface and one in measured
            )
            worse = (one for _, one in rung[ceil(len(rung) / 2) :])
            self._left -= {one for one in worse if outlook_of[one].optimistic_s > best_s}


def _is_promising(outlook: Outlook, best_s: float) -> bool:
    """Worth a first look; where there is nothing to configure, one look settles it."""
    return outlook.is_only_place or outlook.optimistic_s <= HOPELESS * best_s


def outlooks(
    surrogates: Sequence[Surrogate], excluded: Sequence[set[int]], base: Places, measured: set[Places], doubt: float
) -> dict[Contender, Outlook]:
    """What the first surrogate expects of every contender, and how far the others are apart in that.

    All collectives of its surface are at one place of the kind, the other surfaces' at `base`; contenders without a
    place allowed for all of them are left out. `measured` was measured or failed; `doubt` as in `Surrogate.makespans`.
    """
    search_space, by_contender = surrogates[0].model.search_space, {}
    for number, surface in enumerate(search_space.surfaces):
        mine = np.flatnonzero(search_space.surface_of == number).tolist()
        base_kinds = {int(surface.lattice.kind[base[j]]) for j in mine}
        rows = np.repeat(np.array([base], dtype=np.intp), len(surface.lattice), axis=0)
        rows[:, mine] = np.arange(len(rows))[:, None]
        makespans = np.array([surrogate.makespans(rows, doubt) for surrogate in surrogates])
        makespans[:, list(set().union(*(excluded[j] for j in mine)))] = inf
        for kind in np.unique(surface.lattice.kind).tolist():
            of_kind = np.flatnonzero(surface.lattice.kind == kind)
            least_s = makespans[:, of_kind].min(axis=1).tolist()
            if least_s[0] < inf:
                place = int(of_kind[makespans[0, of_kind].argmin()])
                by_contender[number, kind] = Outlook(
                    place=place,
                    makespan_s=least_s[0],
                    log_sd=pstdev(map(log, least_s[1:])) if len(least_s) > 2 else 0.0,
                    is_only_place=len(of_kind) == 1,
                    is_settled=base_kinds == {kind} or tuple(rows[place].tolist()) in measured,
                )
    return by_contender


def places_of_look(
    look: Look,
    outlook_of: Mapping[Contender, Outlook],
    surrogate: Surrogate,
    *,
    excluded: Sequence[set[int]],
    base: Places,
    doubt: float,
) -> Places:
    """The assignment of a look; surfaces without a contender stay at `base`.

    In the first rung the kinds are dealt to the collectives of their surface, the first to the largest, and the places
    are the best together; later all collectives of a surface are at the contender's place.
    """
    search_space, places = surrogate.model.search_space, list(base)
    for surface in {one[0] for one in look.contenders}:
        mine = np.flatnonzero(search_space.surface_of == surface)
        dealt = [one for one in look.contenders if one[0] == surface]
        for number, j in enumerate(mine[np.argsort(-search_space.wire_bytes[mine], kind="stable")].tolist()):
            places[j] = outlook_of[dealt[number % len(dealt)]].place
    if look.is_first_rung:
        kinds = [lattice.kind for lattice in search_space.lattices]
        others = [set(np.flatnonzero(kind != kind[place]).tolist()) for kind, place in zip(kinds, places, strict=True)]
        closed = [bar | other for bar, other in zip(excluded, others, strict=True)]
        best = Allocation(surrogate, closed, doubt).best([places])
        places = places if best is None else best.tolist()
    return tuple(places)


def kinds_at(search_space: SearchSpace, places: Sequence[int]) -> set[Contender]:
    """The contenders that an assignment measures."""
    return {(m, int(search_space.lattices[j].kind[places[j]])) for j, m in enumerate(search_space.surface_of.tolist())}


def name_of(search_space: SearchSpace, contender: Contender) -> str:
    """What it is called."""
    surface, kind = contender
    return "/".join(part for part in search_space.surfaces[surface].lattice.kinds[kind] if part is not None)
