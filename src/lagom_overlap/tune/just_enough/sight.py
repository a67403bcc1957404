"""What a group offers to choose from, and its measurements in those terms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lagom_overlap.backends.base import Assignment, GroupProblem, Measurement
from lagom_overlap.collective import CommConfig, ConfigSpace
from lagom_overlap.tune.just_enough.evidence import usual
from lagom_overlap.tune.just_enough.lattice import (
    Floats,
    Implementation,
    Ints,
    Lattice,
    distances,
    implementation,
    lattice_of,
    step_likeness,
)

Places = tuple[int, ...]
"""One place per collective of a group."""
LEAST_S = 1e-9
"""Shorter times are taken as this: a logarithm needs a positive number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Surface:
    """A lattice and how alike its places are: `near` to a smooth curve, `steps` to one of whole waves."""

    lattice: Lattice
    near: Floats
    steps: Floats


class Surfaces:
    """The surfaces of an iteration: collectives of equal spaces and defaults share theirs."""

    def __init__(self) -> None:
        self._surfaces: dict[object, Surface] = {}

    def of(self, space: ConfigSpace, default: CommConfig, kinds: tuple[Implementation, ...]) -> Surface:
        """The surface of one collective."""
        key = space, default, kinds
        if key not in self._surfaces:
            lattice = lattice_of(space, default, kinds)
            near = np.exp(-0.5 * distances(lattice))
            self._surfaces[key] = Surface(lattice=lattice, near=near, steps=step_likeness(lattice))
        return self._surfaces[key]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sight:
    """The surfaces of a group's collectives: `surfaces[surface_of[j]]` is collective j's; their bytes on the wire."""

    surfaces: tuple[Surface, ...]
    surface_of: Ints
    lattices: tuple[Lattice, ...]
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
    """Usual times of D assignments of N collectives: places (D, N), x (D, N), Y (D,), numbers of runs (D,)."""

    places: Ints
    comm_s: Floats
    comp_s: Floats
    num: Floats


def sight_of(problem: GroupProblem, surfaces: Surfaces) -> Sight:
    """The lattices of a group's collectives; the default's implementation is the first kind where it is allowed."""
    pairs = list(zip(problem.spaces, problem.default, strict=True))
    kinds = dict.fromkeys(implementation(space.subspace_of(default)) for space, default in pairs)
    kinds |= dict.fromkeys(implementation(subspace) for space in problem.spaces for subspace in space.subspaces)
    found = [surfaces.of(space, default, tuple(kinds)) for space, default in pairs]
    different = list(dict.fromkeys(map(id, found)))
    return Sight(
        surfaces=tuple(next(surface for surface in found if id(surface) == each) for each in different),
        surface_of=np.array([different.index(id(surface)) for surface in found], dtype=np.intp),
        lattices=tuple(surface.lattice for surface in found),
        wire_bytes=np.array([float(comm.collective.wire_bytes) for comm in problem.group.comms]),
    )


def record_of(runs: Mapping[Places, Sequence[Measurement]]) -> Record:
    """What the measurements at each place usually took."""
    comm_s = [[usual(column) for column in zip(*(run.comm_s for run in done), strict=True)] for done in runs.values()]
    return Record(
        places=np.array(list(runs), dtype=np.intp),
        comm_s=np.maximum(np.array(comm_s, dtype=np.float64), LEAST_S),
        comp_s=np.maximum([usual([run.comp_s for run in done]) for done in runs.values()], LEAST_S),
        num=np.array([float(sum(run.num_repeats for run in done)) for done in runs.values()]),
    )
