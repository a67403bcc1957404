"""The simulator as a backend: an overlap group on a cluster that need not exist.

The default is spelled out (`ContentionModel.default_config`): NCCL 2.30.7's own choice by size and topology, or, where
the profile says so, what NCCL 2.18.3 took on the Lagom paper's clusters. `CommConfig()` resolves to the same.
"""

from dataclasses import replace
from math import isfinite
from typing import Final

import numpy as np

from lagom_overlap.backends.base import Backend, BackendRequest
from lagom_overlap.collective import (
    NO_LAUNCHES,
    Collective,
    CommConfig,
    ConfigSpace,
    LaunchConfig,
    LaunchSpace,
    launch_of,
)
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import JobError, SpaceError
from lagom_overlap.sim import GroupSimulator
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Measurement, Outcome, corners
from lagom_overlap.units import format_percent
from lagom_overlap.workload import OverlapGroup

_KEYS: Final = {
    "algorithms": "algorithm",
    "protocols": "protocol",
    "transports": "transport",
    "num_channels": "num_channels",
    "num_threads": "num_threads",
    "chunk_bytes": "chunk_bytes",
}
"""The cost model's argument, with which its message begins -> the job's key below `tune.space`."""


def _by_key(message: str) -> str:
    """The cost model's refusal of a limit, with the key of the job file in place of its argument."""
    argument, _, rest = message.partition(" ")
    return f"tune.space.{_KEYS[argument]} {rest}" if argument in _KEYS else f"tune.space: {message}"


class SimulatedBackend:
    """Simulates groups; with noise, each computation and collective time carries its own log-normal factor of median 1.

    The noisy makespan follows the stream that is longer without noise, and is never shorter than either. Noise depends
    on the seed and on how many measurements came before, nothing else. The timeline stays without noise.
    """

    def __init__(self, model: ContentionModel, request: BackendRequest) -> None:
        self._model = model
        self._request = request
        noise = f", {format_percent(request.noise)} noise" if request.noise else ""
        cluster = model.cluster
        self.description = (
            f"simulated: {cluster.gpu.name} GPUs of cluster {cluster.name}, profile {request.profile}{noise}"
        )
        self._launches = _checked_launches(model, request.limits.launches)
        self._simulators: dict[tuple[OverlapGroup, LaunchConfig], GroupSimulator] = {}
        self._num_calls = 0

    def problem(self, group: OverlapGroup) -> GroupProblem:
        """The group's spaces within the job's limits; baselines are the corners of each default's subspace.

        Raises:
            SpaceError: if the limits ask for what the simulator cannot set, or leave nothing.
            JobError: if the group's collectives have more ranks than the cluster has GPUs.
        """
        spaces = tuple(self._space(op.collective) for op in group.comms)
        homes = [
            space.subspace_of(self._model.default_config(op.collective))
            for op, space in zip(group.comms, spaces, strict=True)
        ]
        return GroupProblem(
            group=group,
            spaces=spaces,
            default=tuple(self._default(op.collective) for op in group.comms),
            baselines=corners(homes),
            launches=self._launches,
        )

    def _space(self, collective: Collective) -> ConfigSpace:
        try:
            return self._model.space(collective, self._request.limits)
        except SpaceError as error:
            raise SpaceError(_by_key(str(error))) from None

    def _default(self, collective: Collective) -> CommConfig:
        """The default spelled out; the number of threads is left alone unless the job tunes it."""
        default = self._model.default_config(collective)
        return default if self._request.limits.num_threads else replace(default, num_threads=None)

    def measure(self, group: OverlapGroup, assignment: Assignment) -> Outcome:
        """The simulated times, the median of the requested repeats; `Failure` if a configuration cannot run."""
        key = group, launch_of(assignment)
        if key not in self._simulators:
            self._simulators[key] = GroupSimulator(group, self._model, key[1])
        simulator = self._simulators[key]
        call, self._num_calls = self._num_calls, self._num_calls + 1
        try:
            times = simulator.evaluate(assignment)
        except SpaceError as error:
            return Failure(str(error))
        clean = Measurement(
            makespan_s=times.makespan_s,
            comp_s=times.comp_s,
            comm_s=times.comm_s,
            timeline=simulator.timeline(assignment),
        )
        if not self._request.noise:
            return replace(clean, num_repeats=self._request.repeats)
        random = np.random.default_rng([self._request.seed, call])
        return Measurement.from_runs([self._disturbed(clean, random) for _ in range(self._request.repeats)])

    def close(self) -> None:
        """Forgets what was kept for speed."""
        self._simulators.clear()

    def _disturbed(self, clean: Measurement, random: np.random.Generator) -> Measurement:
        comp_factor, *comm_factors = np.exp(
            self._request.noise * random.standard_normal(1 + len(clean.comm_s))
        ).tolist()
        comp_s = clean.comp_s * comp_factor
        comm_s = tuple(time_s * factor for time_s, factor in zip(clean.comm_s, comm_factors, strict=True))
        comm_factor = sum(comm_s) / clean.total_comm_s
        longer = comp_factor if clean.comp_s >= clean.total_comm_s else comm_factor
        makespan_s = max(comp_s, sum(comm_s), clean.makespan_s * longer)
        return replace(clean, makespan_s=makespan_s, comp_s=comp_s, comm_s=comm_s)


def _checked_launches(model: ContentionModel, launches: LaunchSpace | None) -> LaunchSpace:
    """What may be tried on the computation's side.

    Raises:
        SpaceError: if a carve-out leaves no SM, or no product of this machine heeds one.
    """
    if launches is None:
        return NO_LAUNCHES
    num_sms, gpu = model.cluster.gpu.num_sms, model.cluster.gpu.name
    if launches.sm_carveouts and model.persistent_carve_out_sms is None:
        raise SpaceError(
            "tune.space.sm_carveout: matrix products of this machine are plain kernels, which heed no carve-out; "
            "with cost.sm_carveout = 0 they are persistent ones"
        )
    if launches.sm_carveouts and launches.sm_carveouts[-1] >= num_sms:
        raise SpaceError(
            f"tune.space.sm_carveout holds {launches.sm_carveouts[-1]}, must lie in 0..{num_sms - 1} on {gpu}"
        )
    return launches


def open_backend(request: BackendRequest) -> Backend:
    """The backend of a job with `backend = "simulated"`.

    Raises:
        JobError: if there is no cluster, or noise, repeats or the carve-out is out of range.
        SpaceError: if the limits on the computation's side ask for what the simulator cannot set.
        UnknownNameError: if there is no such cost profile.
    """
    if request.cluster is None:
        raise JobError("the simulated backend needs a cluster; name a preset under [cluster]")
    if not (isfinite(request.noise) and 0 <= request.noise <= 1):
        raise JobError(f"noise is {request.noise}, must lie in 0..1")
    if request.repeats < 1:
        raise JobError(f"repeats is {request.repeats}, must be at least 1")
    model = ContentionModel(
        request.cluster,
        load_profile(request.profile),
        request.sm_carveout,
        request.operators,
        rank_skew_s=request.rank_skew_s,
    )
    return SimulatedBackend(model, request)
