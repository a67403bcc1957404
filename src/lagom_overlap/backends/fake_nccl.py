"""Rehearses the tuner plug-in without a GPU: the real `liblagom_tuner.so` under a fake NCCL, with simulated times.

A measurement writes the assignment as a plug-in table, swaps it in and issues the group's collectives to
the NCCL host (`csrc/nccl/nccl_host.c`), which asks the plug-in as a release of NCCL does. The simulator then
runs what *came out* (algorithm, protocol, grid, chunk), not what was asked for, so a setting that does not take effect
gains nothing. One process stands for every rank. Threads are NCCL's own, as no tuner sets them.

What is fake: NCCL's choice (a caricature of its cost model over 24 channels, no NVLS, no CollNet) and the times (the
contention model). All-to-all and send/recv never reach a tuner and keep the model's default.
"""

import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Final

from lagom_overlap.backends.base import Backend, BackendRequest
from lagom_overlap.backends.simulated import open_backend as open_simulated
from lagom_overlap.collective import (
    Collective,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigSpace,
    ConfigTable,
    Protocol,
    Subspace,
)
from lagom_overlap.collective.sites import cycles_of
from lagom_overlap.cost import ContentionModel, load_profile
from lagom_overlap.errors import BackendError, JobError, SpaceError, TableError
from lagom_overlap.nccl_plugin import fake_host as host
from lagom_overlap.nccl_plugin.channel_limit import EVEN_GATHERS_ONLY
from lagom_overlap.nccl_plugin.library import TunerPlugin, installed_library
from lagom_overlap.nccl_plugin.table_layout import ALGORITHMS, KINDS, MAX_CHANNELS, PROTOCOLS
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator, encode_table, write_table
from lagom_overlap.tuners.problem import Assignment, Failure, GroupProblem, Outcome, corners
from lagom_overlap.workload import CommOp, OverlapGroup

NUM_CHANNELS: Final = 24
"""The communicator's channels: what public logs show for one node of A100 or H100."""
DEFAULT_RELEASE: Final = "2.30"
"""The first with all of a tuner's knobs; PyTorch 2.14 and later bring it."""
NUM_RECORDED: Final = 4096
"""Entries of the plug-in's record ring."""
_FOREIGN_VARIABLES: Final = ("LAGOM_DISABLE", "NCCL_NET_PLUGIN")


class Rehearsal:
    """A process's fake NCCL with our plug-in in it: runs collectives and says what each ran with.

    The plug-in is copied to a folder of this object's own: another file is another instance, so that two rehearsals of
    one process share neither table nor counters. It reads and writes `table` and `record` (its ring) there.
    """

    def __init__(self, model: ContentionModel, *, fake_library: Path, plugin_library: Path, release: str) -> None:
        """Loads both libraries.

        Raises:
            BackendError: if the fake NCCL finds no tuner in the plug-in's file.
        """
        if release not in host.RELEASES:
            raise ValueError(f"release is {release!r}, must be one of {', '.join(host.RELEASES)}")
        self._model = model
        self._folder = Path(tempfile.mkdtemp(prefix="lagom-fake-nccl-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self.table, self.record = self._folder / "table.bin", self._folder / "record.bin"
        library = Path(shutil.copy(plugin_library, self._folder))
        self._environment = {
            "NCCL_TUNER_PLUGIN": str(library),
            "LAGOM_TABLE": str(self.table),
            "LAGOM_RECORD": str(self.record),
            "LAGOM_RECORD_ENTRIES": str(NUM_RECORDED),
            "LAGOM_CHAIN_TUNER": "none",
            **EVEN_GATHERS_ONLY,
        }
        with _environment(self._environment):
            self._nccl = host.FakeNccl(host.load_fake_library(fake_library), release)
        self._comms: dict[CommunicatorId, host.FakeComm] = {}
        if not self.tuner_version:
            self.close()
            raise BackendError(f"{plugin_library.name} holds no tuner that NCCL {release} would take")
        self.plugin = TunerPlugin(library)

    @property
    def tuner_version(self) -> int:
        """The version of the tuner interface that the release takes."""
        return self._nccl.tuner_version

    def communicators(self) -> tuple[ProcessCommunicator, ...]:
        """All communicators in the order of their creation."""
        cluster = self._model.cluster
        return tuple(
            ProcessCommunicator(name, cluster.num_nodes_of(len(name.ranks)), MAX_CHANNELS) for name in self._comms
        )

    def comm(self, op: CommOp) -> host.FakeComm:
        """The collective's communicator, made at its first use as NCCL's are."""
        name = communicator_of(op)
        if name not in self._comms:
            cluster, collective = self._model.cluster, op.collective
            with _environment(self._environment):
                self._comms[name] = self._nccl.comm(
                    collective.num_ranks,
                    cluster.num_nodes_of(collective.num_ranks),
                    num_channels=min(NUM_CHANNELS, cluster.gpu.num_sms - 1),
                    has_ll128=Protocol.LL128 in {s.protocol for s in self._model.space(collective).subspaces},
                )
        return self._comms[name]

    def run(self, op: CommOp) -> CommConfig | Failure:
        """Issues the collective: what it ran with, or a failure where NCCL would have failed or crashed."""
        collective = op.collective
        if collective.kind not in KINDS:
            return CommConfig()
        outcome = self.comm(op).run(collective.kind, collective.num_bytes)
        if outcome.faults:
            return Failure(f"{op.name}: NCCL would fail: {outcome.faults!r}")
        most = self._largest_chunk(collective, outcome)
        return CommConfig(
            algorithm=outcome.algorithm,
            protocol=outcome.protocol,
            num_channels=max(1, outcome.num_channels),
            chunk_bytes=min(most, max(outcome.chunk_bytes)) if most and outcome.chunk_bytes else None,
        )

    def offered(self, op: CommOp) -> set[tuple[object, object]]:
        """The algorithms and protocols that NCCL has for the collective."""
        outcome = self.comm(op).run(op.collective.kind, op.collective.num_bytes, host.HostMode.SIMULATE)
        pairs = [(algorithm, protocol) for algorithm in ALGORITHMS for protocol in PROTOCOLS]
        return {pair for pair, cost in zip(pairs, outcome.cost_before, strict=True) if cost >= 0}

    def close(self) -> None:
        """Destroys the communicators and removes the folder; safe to call twice."""
        for comm in self._comms.values():
            comm.finalize()
        self._comms.clear()
        self._remove()

    def _largest_chunk(self, collective: Collective, outcome: host.CallOutcome) -> int | None:
        """The largest chunk that the model knows for what was chosen, which for rings and trees is NCCL's own."""
        way = (outcome.algorithm, outcome.protocol, None)
        spaces = (s for s in self._model.space(collective).subspaces if (s.algorithm, s.protocol, s.transport) == way)
        return max((size for space in spaces for size in space.chunk_bytes if size is not None), default=None)


class FakeNcclBackend:
    """Implements `Backend`; `effective` is what the last measurement ran, per collective, after NCCL and plug-in."""

    def __init__(
        self, request: BackendRequest, *, fake_library: Path, plugin_library: Path, release: str = DEFAULT_RELEASE
    ) -> None:
        """Loads both libraries.

        Raises:
            JobError: if there is no cluster, or noise or repeats is out of range.
            BackendError: if the fake NCCL finds no tuner in the plug-in's file.
        """
        if request.cluster is None:
            raise JobError("the fake_nccl backend needs a cluster; name a preset under [cluster]")
        self._simulated = open_simulated(request)
        self._request = request
        self._sets_chunk = release in host.WITH_CHUNKS
        self._rehearsal = Rehearsal(
            ContentionModel(request.cluster, load_profile(request.profile), request.sm_carveout, request.operators),
            fake_library=fake_library,
            plugin_library=plugin_library,
            release=release,
        )
        self._generation = 0
        self.effective: Assignment = ()
        self.description = (
            f"fake NCCL {release} with the tuner plug-in (interface v{self._rehearsal.tuner_version}); "
            f"{self._simulated.description}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What may not be concluded from the figures."""
        return (
            "Rehearsed: decisions went through the real plug-in under a fake NCCL; the times come from the contention "
            "model. No hardware and no NCCL was measured.",
        )

    @property
    def arm_words(self) -> Mapping[str, str]:
        """The verdict's contenders in words."""
        return MappingProxyType({"default": "the fake NCCL without decisions"})

    def problem(self, group: OverlapGroup) -> GroupProblem:
        """See `Backend`; the default leaves everything to the fake NCCL. Baselines: `fixed_min`, `fixed_max`.

        Raises:
            SpaceError: if the job's limits leave nothing that a tuner can set.
        """
        modelled = self._simulated.problem(group).spaces
        spaces = tuple(self._space(op, space) for op, space in zip(group.comms, modelled, strict=True))
        return GroupProblem(
            group=group,
            spaces=spaces,
            default=(CommConfig(),) * len(group.comms),
            baselines=corners([space.subspaces[0] for space in spaces]),
        )

    def measure(self, group: OverlapGroup, assignment: Assignment) -> Outcome:
        """The simulated times of what the fake NCCL and the plug-in made of the assignment."""
        if len(assignment) != len(group.comms):
            raise ValueError(f"{len(assignment)} configurations for {len(group.comms)} collectives")
        try:
            self._deploy(group, assignment)
        except (TableError, SpaceError) as error:
            return Failure(str(error))
        effective = []
        for op in group.comms:
            ran = self._rehearsal.run(op)
            if isinstance(ran, Failure):
                return ran
            effective.append(ran)
        self.effective = tuple(effective)
        return self._simulated.measure(group, self.effective)

    def close(self) -> None:
        """Frees what was taken; safe to call twice."""
        self._rehearsal.close()
        self._simulated.close()

    def _deploy(self, group: OverlapGroup, assignment: Assignment) -> None:
        """Writes the table and swaps it in, as a job does between two steps."""
        occurrences: Counter[object] = Counter()
        rows = {}
        for op, config in zip(group.comms, assignment, strict=True):
            self._rehearsal.comm(op)
            site = (op.communicator, op.collective)
            if op.collective.kind in KINDS:
                key = ConfigKey(
                    communicator=communicator_of(op),
                    kind=op.collective.kind,
                    num_bytes=op.collective.num_bytes,
                    occurrence=occurrences[site],
                )
                rows[key] = config
            elif not config.is_untouched:
                raise SpaceError(f"{op.name}: {op.collective.kind} never reaches a tuner; leave it untouched")
            occurrences[site] += 1
        self._generation += 1
        communicators = self._rehearsal.communicators()
        table = ConfigTable(rows, cycles=cycles_of(rows))
        encoded = encode_table(table, generation=self._generation, communicators=communicators)
        write_table(self._rehearsal.table, encoded.data)
        self._rehearsal.plugin.swap(self._generation)

    def _space(self, op: CommOp, modelled: ConfigSpace) -> ConfigSpace:
        """The part of the model's space, already within the job's limits, that NCCL offers and a tuner can set."""
        if op.collective.kind not in KINDS:
            return ConfigSpace((Subspace(),))
        if self._request.limits.num_threads is not None:
            raise SpaceError("tune.space.num_threads: no release of NCCL lets a tuner set threads; leave it out")
        offered = self._rehearsal.offered(op)
        kept = []
        for subspace in modelled.subspaces:
            channels = tuple(n for n in subspace.num_channels if n is not None and n <= NUM_CHANNELS)
            if channels and subspace.transport is None and (subspace.algorithm, subspace.protocol) in offered:
                chunks = subspace.chunk_bytes if self._sets_chunk else (None,)
                kept.append(replace(subspace, num_channels=channels, chunk_bytes=chunks))
        if not kept:
            raise SpaceError(f"tune.space leaves nothing for {op.name!r} that this NCCL offers to a tuner")
        return ConfigSpace(tuple(kept))


def communicator_of(op: CommOp) -> CommunicatorId:
    """The name of a collective's communicator."""
    return CommunicatorId(description=op.communicator, ranks=tuple(range(op.collective.num_ranks)))


_ENVIRONMENT_LOCK: Final = Lock()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """The process's environment as a launcher would have made it, while NCCL and the plug-in read it.

    One at a time: rehearsals on several threads would read each other's.
    """
    names = (*variables, *_FOREIGN_VARIABLES)
    with _ENVIRONMENT_LOCK:
        before = {name: os.environ.get(name) for name in names}
        for name in _FOREIGN_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def open_backend(request: BackendRequest) -> Backend:
    """The backend of a job with `backend = "fake_nccl"`.

    Raises:
        JobError: if there is no cluster, or noise or repeats is out of range.
        MissingDependencyError: if this installation holds no compiled libraries.
    """
    return FakeNcclBackend(
        request,
        fake_library=installed_library(host.FAKE_LIBRARY_NAME),
        plugin_library=installed_library(),
    )
