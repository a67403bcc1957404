"""What a group offers to choose from, and its measurements in those terms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lagom_overlap.backends.base import Assignment, GroupProblem, Measurement
from lagom_overlap.tune.just_enough.lattice import Floats, Ints, Lattice, distances, implementation, lattice_of

Places = tuple[int, ...]
"""One place per collective of a group."""
LEAST_S = 1e-9
"""Shorter times are taken as this: a logarithm needs a positive number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sight:
    """One lattice per collective, equal spaces share one object; squared distances between its places."""

    lattices: tuple[Lattice, ...]
    spreads: tuple[Floats, ...]
    wire_bytes: Floats

    def places_of(self, assignment: Assignment) -> Places | None:
        """Where an assignment lies; None if a configuration is on no lattice (an engine's own, untouched)."""
        pairs = zip(self.lattices, assignment, strict=True)
        places = tuple(lattice.place.get(config, -1) for lattice, config in pairs)
        return None if -1 in places else places

    def assignment_at(self, places: Sequence[int]) -> Assignment:
        """The configurations at one place per collective."""
        return tuple(lattice.configs[place] for lattice, place in zip(self.lattices, places, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """Means over the runs of D assignments of N collectives: places (D, N), x (D, N), Y (D,), numbers of runs (D,)."""

    places: Ints
    comm_s: Floats
    comp_s: Floats
    num: Floats


def sight_of(problem: GroupProblem) -> Sight:
    """The lattices of a group's collectives; the default's implementation is the first kind where it is allowed."""
    pairs = list(zip(problem.spaces, problem.default, strict=True))
    kinds = dict.fromkeys(implementation(space.subspace_of(default)) for space, default in pairs)
    kinds |= dict.fromkeys(implementation(subspace) for space in problem.spaces for subspace in space.subspaces)
    known: dict[object, tuple[Lattice, Floats]] = {}
    for pair in pairs:
        if pair not in known:
            lattice = lattice_of(*pair, list(kinds))
            known[pair] = lattice, distances(lattice)
    return Sight(
        lattices=tuple(known[pair][0] for pair in pairs),
        spreads=tuple(known[pair][1] for pair in pairs),
        wire_bytes=np.array([comm.collective.wire_bytes for comm in problem.group.comms]),
    )


def record_of(runs: Mapping[Places, Sequence[Measurement]]) -> Record:
    """The means of the measurements at each place."""
    comm_s = [np.mean([run.comm_s for run in done], axis=0) for done in runs.values()]
    return Record(
        places=np.array(list(runs), dtype=np.intp),
        comm_s=np.maximum(np.array(comm_s), LEAST_S),
        comp_s=np.maximum([np.mean([run.comp_s for run in done]) for done in runs.values()], LEAST_S),
        num=np.array([float(sum(run.num_repeats for run in done)) for done in runs.values()]),
    )
