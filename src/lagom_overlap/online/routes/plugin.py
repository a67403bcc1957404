"""The route of jobs on NCCL 2.21 and later: decisions by the tuner plug-in, times by profilers (`StepTimer`).

What a step calls is told by the plug-in's own record: what NCCL asked, on which communicator, with which bytes, in
which order. The plug-in decides by that order alone (`collective.sites`), alike on all ranks of a communicator. One is
named by what NCCL tells a tuner: its ranks, its nodes and its place among the equal ones of this process, the same in
every run of a job.
That is a role, which several communicators have: the tensor-parallel ones of two pipeline stages, say, whose calls may
differ. From interface version 5 on (NCCL 2.28) NCCL also tells an id of the communicator itself, equal on all of its
ranks and new in every run: it is no name to save, but it tells which ranks must make the same calls, and must know
their communicator by the same role. Before, all ranks of a role must make the same calls, or the tuning is frozen; and
there is no telling whether ranks count overlapping communicators of one size (pairs in a ring) in different orders.

What may be tried is what NCCL offered in its cost tables (`nccl_plugin.space`), with no more channels than the call's
kernel had under NCCL's own choice (`nccl_plugin.channel_limit`); a call that was never seen to run so is left alone.
A capability map of this box takes away what it refuses. All-gathers keep NCCL's channels where they might be uneven and
NCCL would not cap them.
Algorithms that the communicator has not connected are left out unless the user wants them (`routes.connections`).

Which kernel a call was is told by order: as many collective kernels as recorded calls, kind by kind and size by size.
Grouped calls of like sizes are one recorded call, and are timed as one. Where sizes are so unlike that NCCL asks about
each, each is recorded, and all have the times of the kernel that runs them. Where they do not match (a group of several
kinds, or one of unlike sizes whose kernel's size nobody tells), the step is not timed.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lagom_overlap.collective import CommConfig, CommunicatorId, ConfigKey, ConfigSpace, ConfigTable
from lagom_overlap.collective.size_class import LEAST_BYTES
from lagom_overlap.errors import BackendError, SpaceError
from lagom_overlap.nccl_plugin.capability import BoxMaps
from lagom_overlap.nccl_plugin.channel_limit import channels_within, may_be_uneven, most_channels
from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.nccl_plugin.record_log import (
    Flag,
    Implementation,
    RecordedCommunicator,
    RecordedDecision,
    RecordRing,
)
from lagom_overlap.nccl_plugin.space import tuner_space
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator, encode_table
from lagom_overlap.online.routes.base import NOTHING, CallCount, StepKeys, StepRecord
from lagom_overlap.online.routes.connections import Connections
from lagom_overlap.online.routes.plugin_events import StepTimer, step_record

_log = logging.getLogger(__name__)

FIRST_WITH_IDS: Final = 5
"""The tuner interface whose communicators have ids that all ranks know."""
_MOST_KEYS: Final = 1 << 16
"""Calls whose offers are kept."""
_UNTOUCHED: Final = encode_table(NOTHING, generation=(1 << 64) - 1).data
"""Its generation is that of no switch."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A table, and the generation that the plug-in knows it by."""

    rows: ConfigTable
    epoch: int


class PluginRoute:
    """Implements `Route`; `record` is the path that the plug-in was started with."""

    name = "plugin"

    def __init__(
        self,
        plugin: TunerPlugin,
        *,
        record: Path,
        timer: StepTimer,
        connections: Connections,
        maps: BoxMaps | None = None,
        runs_uneven_gathers: bool = False,
    ) -> None:
        self.description = "NCCL's tuner plug-in: all-reduce, all-gather, reduce-scatter, broadcast, reduce"
        self._plugin = plugin
        self._record = record
        self._timer = timer
        self._maps = maps
        self._runs_uneven_gathers = runs_uneven_gathers
        self._connections = connections
        self._ring: RecordRing | None = None
        self._known: dict[int, RecordedCommunicator] = {}
        self._offered: dict[ConfigKey, frozenset[Implementation]] = {}
        self._grids: dict[ConfigKey, int] = {}
        untouched = _Table(NOTHING, 0)
        self._in_force = self._before = self._prepared = self._stepped = untouched
        self._is_measured = False
        self._is_closed = False
        self._num_large = 0

    def communicators(self) -> tuple[CommunicatorId, ...]:
        """See `Route`."""
        self._take()
        return tuple(communicator.id for communicator in self._process())

    def counts(self) -> Mapping[CommunicatorId, CallCount]:
        """See `Route`; without NCCL's ids, all communicators of a role go by one name, and make the same calls."""
        communicators = dict(self._known)
        counts: dict[CommunicatorId, CallCount] = {}
        for calls in self._plugin.calls():
            if calls.num_ranks > 1 and calls.comm_id in communicators:
                communicator = communicators[calls.comm_id]
                name, wire = _name(communicator), _wire(communicator)
                num_ranks = communicator.num_ranks if communicator.abi_version >= FIRST_WITH_IDS else 0
                before = counts.get(name)
                # Of several ranks of a communicator in this process, the one that has come least far.
                num_calls = calls.num_calls if before is None else min(calls.num_calls, before.num_calls)
                num_here = 1 if before is None else before.num_here + 1
                counts[name] = CallCount(wire, num_calls, num_ranks, num_here)
        return counts

    def space(self, key: ConfigKey) -> ConfigSpace | None:
        """See `Route`: None for what NCCL has not offered yet or run by its own choice, or if nothing is left."""
        offered, grid = self._offered.get(key), self._grids.get(key)
        if offered is None or grid is None:
            return None
        version = max(known.abi_version for known in self._known.values())
        usable = self._connections.usable(key.communicator, offered)
        known = next((known for known in self._several() if _name(known) == key.communicator), None)
        allowed = None
        if self._maps is not None and known is not None:
            allowed = self._maps.of(num_ranks=known.num_ranks, num_nodes=known.num_nodes)
        channels = channels_within(grid)
        num_nodes = 0 if known is None else known.num_nodes
        if self._runs_uneven_gathers and may_be_uneven(key.kind, offered, num_nodes):
            channels = ()
        try:
            space = tuner_space(usable, version, kind=key.kind, capabilities=allowed, num_channels=channels)
        except SpaceError as error:
            _log.warning("%s of %d bytes is left alone: %s", key.kind, key.num_bytes, error)
            return None
        return replace(space, default=CommConfig(num_channels=grid))

    def is_exact(self, key: ConfigKey) -> bool:
        """See `Route`: what only moves bytes is exact; channels and algorithms reorder every reduction."""
        return not key.kind.traits.adds

    def prepare(self, table: ConfigTable, epoch: int) -> None:
        """See `Route`: hands the table to the plug-in, which fills the buffer that it does not decide by.

        From memory: a file may be refused when it is read (a root-squashed NFS gives it to another user).
        """
        self._take()
        self._check_known()
        self._connections.check(table)
        most = most_channels(table)
        encoded = encode_table(
            table,
            generation=epoch,
            communicators=[replace(known, max_channels=most.get(known.id)) for known in self._process()],
            # Of a communicator without a cycle nothing is known that all of its ranks know.
            calls_per_step={(key.communicator, key.kind, key.num_bytes): 0 for key, _ in table},
        )
        for lost in encoded.left_out:
            _log.info("%s of %d bytes: %s", lost.key.kind, lost.key.num_bytes, lost.what)
        self._plugin.prepare(encoded.data, epoch)
        self._prepared = _Table(table, epoch)

    def commit(self, epoch: int) -> None:
        """See `Route`: flips to the other buffer, which cannot fail after its `prepare`."""
        if self._prepared.epoch == epoch:
            self._before, self._in_force = self._in_force, self._prepared
        self._plugin.commit(epoch)
        self._connections.committed()

    def take_back(self, epoch: int) -> None:
        """See `Route`: flips back to the buffer before, which no `prepare` has touched since."""
        if self._in_force.epoch == epoch:
            self._in_force = self._before
            self._plugin.take_back(epoch)
            self._connections.taken_back()

    def settle(self) -> None:
        """See `Route`: a prepared table keeps nothing open."""

    def begin_step(self, *, is_measured: bool) -> None:
        """See `Route`."""
        self._plugin.step()
        if self._in_force is self._stepped:
            self._connections.stepped()
        self._stepped = self._in_force
        self._is_measured = is_measured
        if is_measured:
            self._take()
            if len(self._offered) > _MOST_KEYS:  # a job of ever new sizes; what this step calls is noted anew
                self._offered.clear()
                self._grids.clear()
            self._timer.begin()

    def mark_end(self) -> None:
        """See `Route`."""
        self._num_large = self._plugin.num_large()
        if self._is_measured:
            self._timer.mark_end()

    def goes_on(self) -> bool:
        """See `Route`: by the plug-in's own count, in every step."""
        return self._plugin.num_large() != self._num_large

    def end_step(self) -> StepRecord:
        """See `Route`."""
        duration_s, timed = self._timer.end() if self._is_measured else (0.0, None)
        self._is_measured = False
        decisions = self._take()
        keys = self._keys(decisions)
        for key, decision in zip(keys, decisions, strict=True):
            offered = frozenset(decision.offered_s)
            self._offered[key] = self._offered.get(key, offered) & offered
        record = replace(step_record(keys, duration_s, timed, LEAST_BYTES), wires=self._wires())
        for call in record.calls:
            if call.num_channels and self._is_default(call.key):
                self._grids[call.key] = min(call.num_channels, self._grids.get(call.key, call.num_channels))
        return record

    def _is_default(self, key: ConfigKey) -> bool:
        """Whether a recorded call ran by NCCL's own choice; by class, keys do not tell which rows they had."""
        rows = self._in_force.rows
        return len(rows) == 0 or (rows.size_octaves == 0 and rows.get(key) is None)

    def close(self) -> None:
        """See `Route`."""
        self._is_closed = True
        if self._in_force.rows.lease_steps is None:  # a lease ends by itself, at one call on all ranks
            self._plugin.enable(is_enabled=False)
        self._ring = None  # its descriptor is closed

    @property
    def is_closed(self) -> bool:
        """Whether no further table comes; a lease in force may still decide."""
        return self._is_closed

    def take_over(self) -> None:
        """Decides nothing and is switched on: after an earlier route of this process, at one step on all ranks."""
        self._plugin.install(_UNTOUCHED)
        self._plugin.enable(is_enabled=True)

    def begin_capture(self) -> None:
        """A CUDA graph is captured: until `end_capture` what may be in it keeps NCCL's own choice."""
        self._plugin.begin_capture()

    def end_capture(self) -> bool:
        """The capture is over; whether it holds collectives."""
        return self._plugin.end_capture() > 0

    def _take(self) -> list[RecordedDecision]:
        """What NCCL asked since the last look; calls on communicators of one rank are left out."""
        if self._ring is None:
            if not self._record.exists():  # NCCL has made no communicator
                return []
            self._ring = RecordRing(self._record, self._plugin.flush_record)
        log = self._ring.take()
        self._known |= {communicator.comm_id: communicator for communicator in log.communicators}
        counted = [d for d in log.decisions if Flag.NOT_COUNTED not in d.flags]
        known = [d for d in counted if d.comm_id in self._known and self._known[d.comm_id].num_ranks > 1]
        for decision in known:
            self._connections.note(_name(self._known[decision.comm_id]), decision)
        return known

    def _check_known(self) -> None:
        """A communicator whose announcement was overwritten in the record would take another one's rows."""
        called = [calls.comm_id for calls in self._plugin.calls() if calls.num_ranks > 1]
        lost = sum(comm_id not in self._known for comm_id in called)
        by_role: dict[tuple[int, int], set[int]] = {}
        for known in self._several():
            by_role.setdefault((known.num_ranks, known.num_nodes), set()).add(known.creation_order)
        lost += sum(max(orders) + 1 - len(orders) for orders in by_role.values())
        if lost:
            raise BackendError(f"the plug-in's record does not tell of {lost} communicators that NCCL made")

    def _process(self) -> list[ProcessCommunicator]:
        """This process's communicators in the order of their creation; ranks of one communicator share it."""
        return list(dict.fromkeys(ProcessCommunicator(_name(known), known.num_nodes) for known in self._several()))

    def _several(self) -> list[RecordedCommunicator]:
        """Those of more than one rank."""
        return [known for known in self._known.values() if known.num_ranks > 1]

    def _wires(self) -> dict[CommunicatorId, str]:
        """NCCL's ids of this run, where it tells them: equal on all ranks of a communicator, and on no others."""
        return {_name(k): _wire(k) for k in self._known.values() if k.abi_version >= FIRST_WITH_IDS}

    def _keys(self, decisions: Sequence[RecordedDecision]) -> list[ConfigKey]:
        """A step's calls, numbered in the order in which NCCL asked about them."""
        names: dict[int, StepKeys] = {}
        keys = []
        for decision in decisions:
            named = names.setdefault(decision.comm_id, StepKeys(_name(self._known[decision.comm_id])))
            keys.append(named.next_key(decision.kind, decision.num_bytes))
        return keys


def _wire(communicator: RecordedCommunicator) -> str:
    """What all ranks of a communicator call it in this run."""
    if communicator.abi_version >= FIRST_WITH_IDS:
        return f"{communicator.comm_id:016x}"
    return f"{communicator.num_ranks}/{communicator.num_nodes}/{communicator.creation_order}"


def _name(communicator: RecordedCommunicator) -> CommunicatorId:
    nodes = f"{communicator.num_nodes} node{'s' if communicator.num_nodes != 1 else ''}"
    return CommunicatorId(
        description=f"nccl on {nodes}",
        ranks=tuple(range(communicator.num_ranks)),
        creation_order=communicator.creation_order,
    )
