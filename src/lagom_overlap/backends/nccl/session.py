"""One rank of a measurement on NCCL: the plug-in, the process groups, checks and runs.

A command is an assignment for one group. Every rank passes its plug-in a table in memory; once all have, all switch to
it. A step is marked before each run, so that occurrences count from 0 in each; the plug-in's record shows whether each
setting was applied.
"""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final, cast

import torch
from torch import distributed as dist

from lagom_overlap.backends.nccl.cuda_device import Device
from lagom_overlap.backends.nccl.overlap import HeadStart, NcclOverlap, issue_collective, make_ready, run_overlap
from lagom_overlap.collective import Collective, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.collective.sites import cycles_of
from lagom_overlap.engines.buffers import clear, expected, fill
from lagom_overlap.engines.gloo_group import GlooGroup
from lagom_overlap.engines.gloo_rank import Control
from lagom_overlap.engines.messages import Measured, RunTimes, Wrong
from lagom_overlap.engines.overlap_run import RankRunTimes
from lagom_overlap.errors import BackendError, LagomError, SpaceError, first_line
from lagom_overlap.nccl_plugin.channel_limit import EVEN_GATHERS_ONLY
from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.nccl_plugin.record_log import Flag, RecordedDecision, RecordRing
from lagom_overlap.nccl_plugin.table_layout import KINDS as TUNER_KINDS
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator, encode_table
from lagom_overlap.workload import CommOp, OverlapGroup

WARM_UP_RUNS: Final = 2
"""Untimed runs of a new assignment: NCCL connects an algorithm's channels at its first use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFiles:
    """The plug-in that NCCL loads in this process, and its record."""

    library: Path
    record: Path

    def variables(self) -> dict[str, str]:
        """What must stand in the environment before NCCL makes its first communicator."""
        return {
            "NCCL_TUNER_PLUGIN": str(self.library),
            "LAGOM_TABLE": "",  # tables are handed over in memory
            "LAGOM_RECORD": str(self.record),
            **EVEN_GATHERS_ONLY,
        }


@dataclass(slots=True)
class _Ready:
    overlap: NcclOverlap
    keys: tuple[ConfigKey, ...]
    warm: set[tuple[CommConfig, ...]] = field(default_factory=set)


class NcclSession:
    """Executes commands on one rank; every rank executes the same ones in the same order."""

    def __init__(
        self,
        device: Device,
        files: PluginFiles,
        *,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        after_issue: Callable[[CommOp], object] | None = None,
    ) -> None:
        """Meets the other ranks.

        `after_issue` is told of every collective that was queued (a test drives a fake NCCL with it).

        Raises:
            BackendError: if the ranks do not meet.
        """
        os.environ.update(files.variables())
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(num_ranks)})
        self._device, self._files = device, files
        self._rank, self._num_ranks = rank, num_ranks
        self._timeout = timedelta(seconds=timeout_s)
        self._after_issue = after_issue
        try:
            dist.init_process_group("gloo", rank=rank, world_size=num_ranks, timeout=self._timeout)
        except (RuntimeError, ValueError) as error:
            raise BackendError(f"rank {rank} of {num_ranks} could not meet the others: {first_line(error)}") from error
        control = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]  # just made
        self.control = Control(cast("GlooGroup", control), num_ranks)
        self._plugin = TunerPlugin(files.library)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._ready: dict[OverlapGroup, _Ready] = {}
        self._checked: set[tuple[Collective, CommConfig]] = set()
        self._ring: RecordRing | None = None
        self._tuner_version: int | None = None
        self._num_nodes: int | None = None
        self._generation = 0
        self._head_start = HeadStart()
        self._nothing = torch.zeros(1, device=device.torch_device)

    @property
    def tuner_version(self) -> int | None:
        """The version of the tuner interface that NCCL uses; None: it has not loaded the plug-in."""
        return self._tuner_version

    @property
    def num_nodes(self) -> int | None:
        """The nodes that NCCL says the ranks are on; None: as above."""
        return self._num_nodes

    def decisions(self) -> list[RecordedDecision]:
        """What NCCL asked this rank's plug-in since the last call."""
        if self._ring is None:
            if not self._files.record.exists():
                return []
            self._ring = RecordRing(self._files.record, self._plugin.flush_record)
        log = self._ring.take()
        for communicator in log.communicators:
            self._tuner_version = communicator.abi_version
            self._num_nodes = communicator.num_nodes
        return [d for d in log.decisions if Flag.NOT_COUNTED not in d.flags]

    def measure(self, group: OverlapGroup, assignment: tuple[CommConfig, ...], repeats: int) -> Measured | Wrong:
        """The times, each a maximum over ranks, or which collective was wrong and where.

        Raises:
            BackendError: if the group cannot be run.
            SpaceError: on every rank, if the assignment could not be put in force on one.
        """
        ready = self._ready.get(group)
        if ready is None:
            ready = self._ready[group] = self._make_ready(group)
        self._deploy(ready, assignment)
        wrong = self._check(ready, assignment)
        if wrong is not None:
            return wrong
        warm_ups = 0 if assignment in ready.warm else WARM_UP_RUNS
        ready.warm.add(assignment)
        runs = [self._run(ready) for _ in range(warm_ups + repeats)][warm_ups:]
        return Measured(tuple(times for times, _ in runs), runs[-1][1].spans(group))

    def close(self) -> None:
        """Leaves the other ranks."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _make_ready(self, group: OverlapGroup) -> _Ready:
        occurrences: Counter[object] = Counter()
        keys = []
        for op in group.comms:
            if op.communicator not in self._groups:
                self._groups[op.communicator] = self._open(op.communicator)
            site = (op.communicator, op.collective)
            keys.append(
                ConfigKey(
                    communicator=self._name(op.communicator),
                    kind=op.collective.kind,
                    num_bytes=op.collective.num_bytes,
                    occurrence=occurrences[site],
                )
            )
            occurrences[site] += 1
        return _Ready(make_ready(group, self._device), tuple(keys))

    def _open(self, communicator: str) -> dist.ProcessGroup:
        """A process group whose communicator is made now, so that the order is the same on all ranks."""
        group = dist.new_group(
            backend=self._device.group_backend, timeout=self._timeout, group_desc=f"lagom_{communicator}"
        )
        process_group = cast("dist.ProcessGroup", group)  # every rank is in it
        dist.all_reduce(torch.zeros(1, device=self._device.torch_device), group=process_group)
        self._device.finish()
        return process_group

    def _name(self, communicator: str) -> CommunicatorId:
        return CommunicatorId(description=communicator, ranks=tuple(range(self._num_ranks)))

    def _deploy(self, ready: _Ready, assignment: tuple[CommConfig, ...]) -> None:
        """Puts the assignment in force on all ranks or, with one reason for all, on none."""
        self._generation += 1
        refusal = ""
        try:
            self._plugin.prepare(self._encoded(ready, assignment), self._generation)
        except LagomError as error:
            refusal = str(error)
        willing = self.control.gather(int(not refusal))
        if not all(willing):
            unwilling = ", ".join(str(rank) for rank, is_willing in enumerate(willing) if not is_willing)
            raise SpaceError(refusal or f"rank {unwilling} could not take its table")
        self._plugin.commit(self._generation)

    def _encoded(self, ready: _Ready, assignment: tuple[CommConfig, ...]) -> bytes:
        rows = {}
        for key, config in zip(ready.keys, assignment, strict=True):
            if key.kind in TUNER_KINDS:
                rows[key] = config
            elif not config.is_untouched:
                raise SpaceError(f"{key.kind} never reaches a tuner; leave it untouched")
        communicators = [ProcessCommunicator(self._name(name)) for name in self._groups]
        table = ConfigTable(rows, cycles=cycles_of(ready.keys))
        return encode_table(table, generation=self._generation, communicators=communicators).data

    def _check(self, ready: _Ready, assignment: tuple[CommConfig, ...]) -> Wrong | None:
        """Runs each collective whose configuration is new and compares; all ranks learn the same verdict."""
        comms = ready.overlap.group.comms
        if all((op.collective, config) in self._checked for op, config in zip(comms, assignment, strict=True)):
            return None
        for place, op in enumerate(comms):
            buffers = ready.overlap.buffers[place]
            fill(op.collective, self._rank, buffers)
            self._issue(ready, place)
            self._device.finish()
            wanted = expected(op.collective, self._rank).to(buffers.target.device)
            verdicts = self.control.gather(int(torch.equal(buffers.target, wanted)))
            clear(buffers)
            if not all(verdicts):
                return Wrong(place, tuple(rank for rank, verdict in enumerate(verdicts) if not verdict))
            self._checked.add((op.collective, assignment[place]))
        return None

    def _run(self, ready: _Ready) -> tuple[RunTimes, RankRunTimes]:
        mine = run_overlap(
            ready.overlap,
            self._device,
            lambda place: self._issue(ready, place),
            ranks=self.control,
            meet=self._meet,
            head_start=self._head_start,
        )
        makespan_s, comp_s, *comm_s = self.control.maxima(mine.as_vector())
        return RunTimes(makespan_s, comp_s, tuple(comm_s)), mine

    def _meet(self) -> None:
        """Queues four bytes on all ranks' default streams, on the first communicator: no table has a row for them."""
        if self._groups:
            dist.all_reduce(self._nothing, group=next(iter(self._groups.values())))

    def _issue(self, ready: _Ready, place: int) -> None:
        op = ready.overlap.group.comms[place]
        issue_collective(op.collective, ready.overlap.buffers[place], self._groups[op.communicator])
        if self._after_issue is not None:
            self._after_issue(op)
