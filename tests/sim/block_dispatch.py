"""Block-level event simulation of one overlap group: contention both ways, where `sim.group` uses average rates.

What is different from the rates of Eqs 4-6:

- Blocks go to free SMs. A collective takes SMs first (NCCL's stream has priority), but only free ones: it waits for
  blocks that run, holds what it has, and moves bytes once all its channels are resident. A launch can turn that round:
  a computation enqueued first takes free SMs before a collective issued at the same moment, and on a stream of normal
  priority a collective takes none while the kernel launched before it still has blocks to start.
- A displaced block waits until an SM is free: the collective has ended, or a block has. A wave that is cut short by
  the end of a collective is refilled at once, and the last wave is as full as it is.
- A block takes theta and, during n - 1 others, n D / (B - V) for its bytes (Eq. 6 with the blocks that really run), so
  a short last wave has more bandwidth per block.
- Collectives on different streams run at the same time: SMs add up, the link is shared.

Alone, and during a collective that covers it from the start, a kernel takes exactly g f (Eqs 5 and 6 with ceilings,
p = 1). An oracle for tests and benchmarks: it shares no event loop with `sim.core` and costs several hundred
times as much.

Departures: all blocks of a kernel are equal; a kernel starts when the one before has ended to the last block; kernels
of many small blocks retire so often that a collective never waits for them; channels of a collective wait for each
other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

from lagom_overlap.collective import UNTOUCHED_LAUNCH, CommConfig, LaunchConfig, LaunchOrder, StreamPriority
from lagom_overlap.cost import CollectiveCost, ContentionModel
from lagom_overlap.cost.lagom_equations import eq6_wave_time, l2_miss_share
from lagom_overlap.sim.group import GroupTimes
from lagom_overlap.workload import Kernel, OverlapGroup

_DONE: Final = 1e-12


def block_seconds(
    model: ContentionModel, kernel: Kernel, num_resident: int, comms: Sequence[CollectiveCost], memory_load: float = 0.0
) -> float:
    """Seconds of one block of a kernel of which `num_resident` run, during collectives that move bytes (Eq. 6)."""
    profile, gpu = model.profile, model.cluster.gpu
    pollution = profile.pollution * l2_miss_share(sum(c.fifo_bytes for c in comms), gpu.l2_bytes, profile.l2_share)
    return eq6_wave_time(
        kernel.wave_s,
        1.0,
        num_blocks=num_resident,
        block_bytes=kernel.block_bytes * (1.0 + pollution),
        free_bytes_per_s=gpu.hbm_bytes_per_s - model._traffic(comms, memory_load),
        norm=profile.overlap_norm,
    )


@dataclass(slots=True)
class _Batch:
    """Blocks that were dispatched together; `left` is the share of their work that remains."""

    num_blocks: int
    left: float = 1.0


@dataclass(slots=True)
class _Comm:
    """A collective that was issued: SMs that it still needs, the share of its bytes that remains.

    `is_behind`: the blocks of the kernel that runs go first.
    """

    cost: CollectiveCost
    needs: int
    start_s: float
    is_behind: bool = False
    left: float = 1.0
    end_s: float | None = None

    @property
    def held(self) -> int:
        """SMs that it keeps from computation."""
        return 0 if self.end_s is not None else self.cost.num_channels - self.needs

    @property
    def runs(self) -> bool:
        """Whether all its channels are resident and it is not done."""
        return self.needs == 0 and self.end_s is None


class _Sms:
    """The SMs: who holds how many, and what runs on them."""

    def __init__(self, model: ContentionModel, launch: LaunchConfig) -> None:
        self._model = model
        self._is_normal = launch.priority is StreamPriority.NORMAL
        self._computation_first = launch.order is LaunchOrder.COMPUTATION_FIRST
        self._num_sms = model.cluster.gpu.num_sms
        self.batches: list[_Batch] = []
        self.comms: list[_Comm] = []
        self.waiting = 0
        self._kernel: Kernel | None = None

    def launch(self, kernel: Kernel) -> None:
        """Queues all blocks of the next kernel."""
        self._kernel, self.waiting = kernel, kernel.num_blocks

    def issue(self, comm: _Comm) -> None:
        """Queues a collective: behind the kernel, if that was launched earlier or goes first."""
        is_new = self._kernel is not None and self.waiting == self._kernel.num_blocks
        comm.is_behind = bool(self.waiting) and (self._computation_first if is_new else self._is_normal)
        self.comms.append(comm)

    @property
    def resident(self) -> int:
        """Blocks that run."""
        return sum(batch.num_blocks for batch in self.batches)

    def _shares_sm(self, kernel: Kernel) -> bool:
        return kernel.blocks_per_sm >= self._model.profile.small_block_count

    def dispatch(self) -> None:
        """Collectives take free SMs in order of issue, blocks what room is left; collectives behind come after them."""
        self._take_sms([comm for comm in self.comms if not comm.is_behind])
        self._start_blocks()
        behind = [comm for comm in self.comms if comm.is_behind]
        self._take_sms(behind)
        if not self._is_normal or not self.waiting:
            for comm in behind:
                comm.is_behind = False

    def _take_sms(self, comms: Sequence[_Comm]) -> None:
        kernel, held = self._kernel, sum(comm.held for comm in self.comms)
        busy = 0
        if kernel is not None and not self._shares_sm(kernel):
            busy = ceil(self.resident / kernel.blocks_per_sm)
        free = self._num_sms - held - busy
        for comm in comms:
            # The last SM stays with computation, as in the rates: otherwise nothing would ever end.
            taken = max(0, min(comm.needs, free, self._num_sms - 1 - held))
            comm.needs -= taken
            held, free = held + taken, free - taken

    def _start_blocks(self) -> None:
        kernel, held = self._kernel, sum(comm.held for comm in self.comms)
        if kernel is None or not self.waiting:
            return
        room = (self._num_sms - held) * kernel.blocks_per_sm - self.resident
        if self._shares_sm(kernel):
            room += int(held * self._model.profile.small_block_share * kernel.blocks_per_sm)
        started = min(self.waiting, max(0, room))
        if started:
            self.batches.append(_Batch(started))
            self.waiting -= started

    def times(self) -> tuple[float, list[float]]:
        """Seconds of a whole block, and of each running collective as a whole, while nothing changes."""
        running = [comm.cost for comm in self.comms if comm.runs]
        model, kernel, resident = self._model, self._kernel, self.resident
        load = 0.0
        if kernel is not None and resident:
            unloaded = block_seconds(model, kernel, resident, running)
            load = min(1.0, resident * kernel.block_bytes / unloaded / model.cluster.gpu.hbm_bytes_per_s)
        comm_s = model.collective_seconds(running, load)
        if kernel is None or not resident:
            return inf, comm_s
        return block_seconds(model, kernel, resident, running, load), comm_s

    def advance(self, step_s: float, block_s: float, comm_s: Sequence[float], now: float) -> None:
        """Lets `step_s` pass; what is done leaves its SMs."""
        for batch in self.batches:
            batch.left -= step_s / block_s
        self.batches = [batch for batch in self.batches if batch.left > _DONE]
        for comm, whole_s in zip([comm for comm in self.comms if comm.runs], comm_s, strict=True):
            comm.left -= step_s / whole_s
            if comm.left <= _DONE:
                comm.end_s = now

    @property
    def kernel_is_done(self) -> bool:
        """Whether no block waits or runs."""
        return not self.waiting and not self.batches


class DispatchSimulator:
    """Evaluates assignments of one group block by block; the same call gives the same bits."""

    def __init__(self, group: OverlapGroup, model: ContentionModel, launch: LaunchConfig = UNTOUCHED_LAUNCH) -> None:
        self._group = group
        self._model = model = model.launched(launch)
        self._launch = launch
        self._kernels: Final = [model.kernel(op.work) for op in group.computations]

    def evaluate(self, assignment: Sequence[CommConfig]) -> GroupTimes:
        """The group's times under one configuration per collective; None knobs are the model's default.

        A collective's time counts from when it could start, waiting for SMs included.

        Raises:
            SpaceError: if a configuration cannot run.
            ValueError: if the number of configurations is not that of the collectives.
        """
        if len(assignment) != len(self._group.comms):
            raise ValueError(f"{len(assignment)} configurations for {len(self._group.comms)} collectives")
        costs = [
            self._model.collective(op.collective, config)
            for op, config in zip(self._group.comms, assignment, strict=True)
        ]
        sms = _Sms(self._model, self._launch)
        issued: dict[int, _Comm] = {}
        comp, now, comp_end = 0, 0.0, 0.0
        sms.launch(self._kernels[0])
        while True:
            self._issue(sms, issued, costs, comp, now)
            sms.dispatch()
            block_s, comm_s = sms.times()
            steps = [batch.left * block_s for batch in sms.batches]
            running = [comm for comm in sms.comms if comm.runs]
            steps += [comm.left * whole_s for comm, whole_s in zip(running, comm_s, strict=True)]
            if not steps:
                break
            step_s = min(steps)
            now += step_s
            sms.advance(step_s, block_s, comm_s, now)
            if comp < len(self._kernels) and sms.kernel_is_done:
                comp, comp_end = comp + 1, now
                if comp < len(self._kernels):
                    sms.launch(self._kernels[comp])
        spans = [(comm.end_s or now) - comm.start_s for _, comm in sorted(issued.items())]
        return GroupTimes(makespan_s=now, comp_s=comp_end, comm_s=tuple(spans))

    def _issue(
        self, sms: _Sms, issued: dict[int, _Comm], costs: Sequence[CollectiveCost], comp: int, now: float
    ) -> None:
        """Issues the next collective of every stream whose predecessor has ended and whose computations are done."""
        blocked: set[str] = set()
        for place, op in enumerate(self._group.comms):
            if op.stream in blocked:
                continue
            known = issued.get(place)
            if known is not None:
                if known.end_s is None:
                    blocked.add(op.stream)
                continue
            blocked.add(op.stream)
            if self._group.starts_after[place] <= comp:
                limit = self._model.cluster.gpu.num_sms - 1
                issued[place] = _Comm(costs[place], min(costs[place].num_channels, limit), now)
                sms.issue(issued[place])
        sms.comms = [comm for comm in sms.comms if comm.end_s is None]
