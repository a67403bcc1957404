"""A job without torch: ranks are threads, the store is a dictionary, collectives are formulas.

The store waits and compares as `torch.distributed`'s does. A call of the job checks that every rank makes it under the
same setting, which is what a real collective would hang or go wrong on.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from threading import Barrier, BrokenBarrierError, Condition, Lock

from lagom_overlap.collective import (
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigSpace,
    ConfigTable,
    Subspace,
)
from lagom_overlap.collective.sites import RoleCycle, SiteSetting
from lagom_overlap.errors import BackendError
from lagom_overlap.online.journal import JournalFile
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.exchange import Exchange
from lagom_overlap.online.ranks.leader import Leader
from lagom_overlap.online.ranks.member import Member
from lagom_overlap.online.ranks.search import StudyFactory
from lagom_overlap.online.routes.base import CallCount, CallRecord, StepRecord, TableCursor
from lagom_overlap.tuners.guard import Guarded
from lagom_overlap.tuners.lagom import Lagom
from lagom_overlap.tuners.study import Study

CHANNELS = (1, 2, 4, 8)
CHUNKS = (1 << 19, 1 << 20, 1 << 21)
SPACE = ConfigSpace((Subspace(num_channels=CHANNELS, chunk_bytes=CHUNKS),))
GATHERED, SCATTERED = 8 << 20, 16 << 20


class FakeStore:
    """A store for threads; `is_gone` makes every call fail, as when the process that holds it has ended."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_gone = False
        self._changed = Condition()

    def _check(self) -> None:
        if self.is_gone:
            raise RuntimeError("Connection reset by peer\nmore lines")

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._check()
            self.values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=300))
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            self._check()
            arrived = self._changed.wait_for(
                lambda: self.is_gone or all(key in self.values for key in keys), timeout.total_seconds()
            )
            self._check()
            if not arrived:
                raise RuntimeError(f"wait timeout, keys: {keys}")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            self._check()
            return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._changed:
            self._check()
            if (key not in self.values and expected == "") or self.values.get(key) == expected.encode():
                self.values[key] = desired.encode()
                self._changed.notify_all()
            return self.values.get(key, expected.encode())

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self._check()
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def delete_key(self, key: str) -> bool:
        with self._changed:
            self._check()
            return self.values.pop(key, None) is not None


def comm_s(kind: CollectiveKind, num_bytes: int, config: CommConfig) -> float:
    """Untouched is middling; more channels and larger chunks are quicker."""
    channels, chunk = config.num_channels or 2, config.chunk_bytes or CHUNKS[0]
    factor = 2.0 if kind is CollectiveKind.REDUCE_SCATTER else 1.0
    return factor * num_bytes / 1e9 * (1 + 4 / channels + CHUNKS[0] / chunk)


def comp_s(alone_s: float, configs: list[CommConfig]) -> float:
    """Channels slow the concurrent computation."""
    return alone_s * (1 + 0.03 * sum(config.num_channels or 2 for config in configs))


@dataclass
class Meeting:
    """Where the ranks' calls meet; it notes every setting under which a call ran."""

    num_ranks: int
    timeout_s: float = 20.0
    mismatches: list[str] = field(default_factory=list)
    used: Counter[tuple[str, CommConfig]] = field(default_factory=Counter)
    seen: dict[int, tuple[ConfigKey, CommConfig]] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.barrier = Barrier(self.num_ranks)

    def call(self, number: int, key: ConfigKey, config: CommConfig) -> None:
        with self.lock:
            other = self.seen.setdefault(number, (key, config))
            if other != (key, config):
                self.mismatches.append(f"call {number}: {other} and {(key, config)}")
            self.used[str(key.kind), config] += 1

    def step_done(self) -> None:
        self.barrier.wait(self.timeout_s)


class SimulatedRoute:
    """Implements `Route`: three equal windows of an all-gather and a reduce-scatter that overlap computation."""

    name = "simulated"
    description = "formulas"

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        meeting: Meeting | None = None,
        *,
        alone_s: float = 0.05,
        num_layers: int = 3,
        fails_at: int | None = None,
    ) -> None:
        self.communicator = CommunicatorId(description="fsdp", ranks=tuple(range(num_ranks)))
        self.rank = rank
        self.meeting = meeting or Meeting(num_ranks)
        self.alone_s = alone_s
        self.num_layers = num_layers
        self.fails_at = fails_at
        self.table = ConfigTable({})
        self.prepared: ConfigTable | None = None
        self.in_force = TableCursor(self.table, self.communicator)
        self.before = (0, self.table, self.in_force)
        self.num_calls = 0
        self.epochs: list[int] = []
        self.step = -1
        self.is_closed = False
        self.record: StepRecord | None = None
        self.delay: Callable[[int], float] = lambda step: 1.0

    def communicators(self) -> tuple[CommunicatorId, ...]:
        return (self.communicator,)

    def space(self, key: ConfigKey) -> ConfigSpace | None:
        return SPACE

    def is_exact(self, key: ConfigKey) -> bool:
        return key.kind is CollectiveKind.ALL_GATHER

    def prepare(self, table: ConfigTable, epoch: int) -> None:
        if self.fails_at is not None and epoch >= self.fails_at:
            raise BackendError("no space left on device")
        self.prepared = table

    def commit(self, epoch: int) -> None:
        assert self.prepared is not None
        self.before, self.table, self.prepared = (epoch, self.table, self.in_force), self.prepared, None
        self.in_force = TableCursor(self.table, self.communicator)
        self.epochs.append(epoch)

    def take_back(self, epoch: int) -> None:
        if self.before[0] == epoch:
            _, self.table, self.in_force = self.before

    def counts(self) -> dict[CommunicatorId, CallCount]:
        return {self.communicator: CallCount("all", self.num_calls, len(self.communicator.ranks))}

    def settle(self) -> None:
        pass

    def begin_step(self, *, is_measured: bool) -> None:
        pass

    def mark_end(self) -> None:
        pass

    def goes_on(self) -> bool:
        return False

    def end_step(self) -> StepRecord:
        assert self.record is not None
        return self.record

    def close(self) -> None:
        self.is_closed = True
        if self.table.lease_steps is None:
            self.table = ConfigTable({})
            self.in_force = TableCursor(self.table, self.communicator)

    def call(self, key: ConfigKey) -> CommConfig:
        """A call of the job: checked against those that the other ranks make at its place in the sequence."""
        row = self.in_force.next_row(key.kind, key.num_bytes)
        config = CommConfig() if row is None else row[1]
        self.meeting.call(self.num_calls, key, config)
        self.num_calls += 1
        return config

    def run(self) -> StepRecord:
        """One step of the job: the calls, checked against the other ranks, and their times."""
        self.step += 1
        now, calls = 0.0, []
        for layer in range(self.num_layers):
            keys = [
                ConfigKey(communicator=self.communicator, kind=kind, num_bytes=num_bytes, occurrence=layer)
                for kind, num_bytes in (
                    (CollectiveKind.ALL_GATHER, GATHERED),
                    (CollectiveKind.REDUCE_SCATTER, SCATTERED),
                )
            ]
            configs = [self.call(key) for key in keys]
            slower = self.delay(self.step)
            took = [slower * comm_s(key.kind, key.num_bytes, config) for key, config in zip(keys, configs, strict=True)]
            joined = now + slower * comp_s(self.alone_s, configs)
            resumed = max(joined, now + sum(took))
            for number, key in enumerate(keys):
                begun = now + sum(took[:number])
                calls.append(
                    CallRecord(
                        key=key,
                        issued_s=now,
                        begun_s=begun,
                        ended_s=begun + took[number],
                        joined_s=joined,
                        resumed_s=max(joined, begun + took[number]),
                    )
                )
            now = resumed
        self.record = StepRecord(duration_s=now, calls=tuple(calls))
        self.meeting.step_done()
        return self.record


def study_of(options: OnlineOptions) -> StudyFactory:
    """What `OnlineTuner` makes, without entry points."""
    return lambda problems, warm, steps_left: Study(
        problems,
        Guarded(Lagom(problems, seed=options.seed), problems),
        seed=options.seed,
        num_pairs=options.num_pairs,
    )


@dataclass
class Job:
    """Ranks on their threads. `store` outlives a run, as the launcher's does."""

    num_ranks: int = 2
    options: OnlineOptions = field(default_factory=lambda: OnlineOptions(timeout_s=20.0, num_pairs=3))
    make_study: StudyFactory | None = None
    store: FakeStore = field(default_factory=FakeStore)
    started: tuple[SiteSetting, ...] = ()
    cycles: tuple[RoleCycle, ...] = ()
    size_octaves: int = 0
    journals: tuple[JournalFile | None, ...] = ()
    routes: list[SimulatedRoute] = field(default_factory=list)
    members: list[Member] = field(default_factory=list)
    plans: list[list[tuple[str, int]]] = field(default_factory=list)
    leader: Leader | None = None
    lives: list[Future[list[StepRecord]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.meeting = Meeting(self.num_ranks)
        self.routes = [SimulatedRoute(rank, self.num_ranks, self.meeting) for rank in range(self.num_ranks)]
        self.plans = [[] for _ in range(self.num_ranks)]
        self.now_s = [0.0] * self.num_ranks

    def start(self) -> None:
        """Makes the members, rank 0 last: nothing may depend on its being first."""
        members: dict[int, Member] = {}
        for rank in reversed(range(self.num_ranks)):
            if rank == 0:
                self.leader = Leader(
                    self.options,
                    self.make_study or study_of(self.options),
                    num_ranks=self.num_ranks,
                    route_name="simulated",
                    started=self.started,
                    cycles=self.cycles,
                    size_octaves=self.size_octaves,
                )
            members[rank] = Member(
                Exchange(self.store, rank=rank, num_ranks=self.num_ranks, timeout_s=self.options.timeout_s),
                self.routes[rank],
                leader=self.leader if rank == 0 else None,
                journal=self.journals[rank] if self.journals else None,
                is_exact_only=self.options.deterministic,
                clock=partial(self.now_s.__getitem__, rank),
            )
        self.members = [members[rank] for rank in range(self.num_ranks)]

    def one_step(self, rank: int) -> StepRecord:
        member = self.members[rank]
        member.begin_step()
        self.plans[rank].append((str(member.plan.state), member.plan.epoch))
        record = self.routes[rank].run()
        self.now_s[rank] += round(record.duration_s * 2**30) / 2**30  # so that differences are exact, as the times are
        member.end_step()
        return record

    def run(self, steps: int, work: Callable[[int, int], None] | None = None) -> list[list[StepRecord]]:
        """Every rank makes its steps; `work(rank, step)` runs in each, inside the step. Errors are raised here."""
        if not self.members:
            self.start()

        def live(rank: int) -> list[StepRecord]:
            records = []
            try:
                for step in range(steps):
                    if work is not None:
                        work(rank, step)
                    records.append(self.one_step(rank))
            except BackendError:  # a rank that ends the job keeps no other waiting
                self.meeting.barrier.abort()
                raise
            return records

        with ThreadPoolExecutor(self.num_ranks) as pool:
            self.lives = [pool.submit(live, rank) for rank in range(self.num_ranks)]
            return [life.result() for life in self.lives]


__all__ = ["BrokenBarrierError", "FakeStore", "Job", "Meeting", "SimulatedRoute", "comm_s", "study_of"]
