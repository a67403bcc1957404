"""What each rank says and hears in a window of the online tuner, for 8 to 16,384 ranks; nothing but this process runs.

    python benchmarks/protocol_scale.py --ranks 8,64,512,4096,16384 --json

Every rank is a real `Member` with a real `Exchange`, rank 0 with a real `Leader`; the store is a dictionary that counts
for each rank the calls it makes and the bytes it writes and reads. Ranks make their steps one after the other, from the
last to the first, so that who reports to a rank has done so before it looks. The job is 8-way tensor parallel, in up to
8 pipeline stages with calls of their own, the rest data parallel: three kinds of communicators, two layers a step.

One window is recorded, then `--windows` are watched (one in eight measures calls); a switch of settings is not among
them: it costs each rank three more calls (count up, wait, read), however many there are.
"""

import argparse
import json
from collections import defaultdict
from datetime import timedelta
from functools import cache

from rich.console import Console
from rich.table import Table

from lagom_overlap.collective import CollectiveKind, CommunicatorId, ConfigKey, ConfigSpace, ConfigTable, Subspace
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks.exchange import Exchange
from lagom_overlap.online.ranks.leader import Leader
from lagom_overlap.online.ranks.member import Member
from lagom_overlap.online.ranks.messages import SwitchState
from lagom_overlap.online.ranks.tree import post_of
from lagom_overlap.online.routes.base import CallCount, CallRecord, StepRecord
from lagom_overlap.tuners.base import Problems
from lagom_overlap.tuners.fixed import Default
from lagom_overlap.tuners.study import Study
from lagom_overlap.tuners.warm_start import WarmStart

TENSOR, STAGES, LAYERS = 8, 8, 2
SPACE = ConfigSpace((Subspace(num_channels=(1, 2, 4, 8), chunk_bytes=(1 << 19, 1 << 20)),))
WATCH_STEPS = 8


class CountingStore:
    """One dictionary for all ranks; a key that is not there is never waited for."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.most_bytes = 0

    def note(self) -> None:
        """Remembers the largest size so far."""
        self.most_bytes = max(self.most_bytes, sum(len(key) + len(value) for key, value in self.values.items()))


class View:
    """One rank's connection to the store: implements `Store` and counts."""

    def __init__(self, store: CountingStore) -> None:
        self._values = store.values
        self.num_calls = self.num_written = self.num_read = 0

    def _read(self, key: str) -> bytes:
        value = self._values[key]
        self.num_read += len(value)
        return value

    def set(self, key: str, value: str) -> None:
        """Writes."""
        self.num_calls += 1
        self.num_written += len(value)
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Reads."""
        self.num_calls += 1
        return self._read(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Reads several."""
        self.num_calls += 1
        return [self._read(key) for key in keys]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Raises where a key is not there."""
        self.num_calls += 1
        if any(key not in self._values for key in keys):
            raise RuntimeError("not there")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Writes if the value is the expected one."""
        self.num_calls += 1
        self.num_written += len(desired)
        if key not in self._values and not expected:
            self._values[key] = desired.encode()
        return self._read(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        self.num_calls += 1
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Counts up."""
        self.num_calls += 1
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def delete_key(self, key: str) -> bool:
        """Forgets."""
        self.num_calls += 1
        return self._values.pop(key, None) is not None


@cache
def communicators(rank: int, num_ranks: int) -> tuple[int, tuple[CommunicatorId, ...]]:
    """The stage of a rank and its communicators: tensor, data and pipeline parallel, where they have two ranks."""
    tensor = min(TENSOR, num_ranks)
    stages = min(STAGES, num_ranks // tensor)
    per_stage = num_ranks // stages
    stage, within = divmod(rank, per_stage)
    return stage, tuple(
        _communicator(name, first, step, count)
        for name, first, step, count in (
            ("tp", rank - rank % tensor, 1, tensor),
            ("dp", stage * per_stage + within % tensor, tensor, per_stage // tensor),
            ("pp", within, per_stage, stages),
        )
        if count > 1
    )


@cache
def _communicator(name: str, first: int, step: int, count: int) -> CommunicatorId:
    return CommunicatorId(description=name, ranks=tuple(range(first, first + step * count, step)))


class Layers:
    """Implements `Route`: a step of two layers on all communicators of a rank; the stage makes the sizes."""

    name = "simulated"
    description = "formulas"

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._step: StepRecord | None = None

    def communicators(self) -> tuple[CommunicatorId, ...]:
        """Of this rank."""
        return communicators(self._rank, self._num_ranks)[1]

    def space(self, key: ConfigKey) -> ConfigSpace | None:
        """The same for every call."""
        return SPACE

    def is_exact(self, key: ConfigKey) -> bool:
        """Always."""
        return True

    def counts(self) -> dict[CommunicatorId, CallCount]:
        """All ranks stand alike."""
        return {name: CallCount(f"{name.description}{name.ranks[0]}", 0) for name in self.communicators()}

    def settle(self) -> None:
        """Nothing."""

    def prepare(self, table: ConfigTable, epoch: int) -> None:
        """Nothing."""

    def commit(self, epoch: int) -> None:
        """Nothing."""

    def begin_step(self, *, is_measured: bool) -> None:
        """Nothing."""

    def mark_end(self) -> None:
        """Nothing."""

    def goes_on(self) -> bool:
        """Never."""
        return False

    def end_step(self) -> StepRecord:
        """The step, by its formula: always the same."""
        if self._step is None:
            self._step = self._made()
        return self._step

    def _made(self) -> StepRecord:
        stage, names = communicators(self._rank, self._num_ranks)
        calls, now = [], 0.0
        for layer in range(LAYERS):
            for name in names:
                key = ConfigKey(
                    communicator=name,
                    kind=CollectiveKind.ALL_GATHER,
                    num_bytes=1 << 20 if name.description == "pp" else (stage + 1) << 20,
                    occurrence=layer,
                )
                end = now + 1e-3
                calls.append(CallRecord(key=key, issued_s=now, begun_s=now, ended_s=end, joined_s=end, resumed_s=end))
                now = end
        return StepRecord(duration_s=now, calls=tuple(calls))

    def close(self) -> None:
        """Nothing."""


def _study(problems: Problems, _: WarmStart | None, __: int) -> Study:
    return Study(problems, Default(problems), num_pairs=3)


def simulate(num_ranks: int, num_windows: int) -> dict[str, float]:
    """One row of the table."""
    store, options = CountingStore(), OnlineOptions(watch_steps=WATCH_STEPS, max_steps=0, timeout_s=1.0)
    views = [View(store) for _ in range(num_ranks)]
    leader = Leader(options, _study, num_ranks=num_ranks, route_name="simulated")
    members = [
        Member(
            Exchange(view, rank=rank, num_ranks=num_ranks, timeout_s=1.0),
            Layers(rank, num_ranks),
            leader=leader if rank == 0 else None,
        )
        for rank, view in enumerate(views)
    ]
    for _ in range(options.window_steps + num_windows * WATCH_STEPS):
        for member in members:
            member.begin_step()
        for member in reversed(members):
            member.end_step()
        store.note()
    assert all(member.plan.state is SwitchState.WATCH for member in members), members[0].plan
    assert members[0].plan.window == num_windows, members[0].plan
    per_window = num_windows + 1
    roles: dict[str, list[View]] = defaultdict(list)
    for rank, view in enumerate(views):
        roles["all"].append(view)
        roles["root" if rank == 0 else "inner" if post_of(rank, num_ranks).children else "leaf"].append(view)
    row: dict[str, float] = {"num_ranks": num_ranks, "height": post_of(0, num_ranks).height}
    for role in ("leaf", "inner", "root"):
        row[f"{role}_calls"] = max((view.num_calls for view in roles[role]), default=0) / per_window
        row[f"{role}_written_bytes"] = max((view.num_written for view in roles[role]), default=0) / per_window
        row[f"{role}_read_bytes"] = max((view.num_read for view in roles[role]), default=0) / per_window
    return row | {"store_most_bytes": store.most_bytes, "store_bytes_per_rank": store.most_bytes / num_ranks}


def main(argv: list[str] | None = None) -> None:
    """Runs the benchmark and prints its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", default="8,64,512,4096,16384", help="numbers of ranks, by comma")
    parser.add_argument("--windows", type=int, default=8, help="watched windows")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
    args = parser.parse_args(argv)
    rows = [simulate(int(num_ranks), args.windows) for num_ranks in args.ranks.split(",")]
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    table = Table(title="messages of one rank in one window (the most of any rank)")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:.4g}" for value in row.values()))
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
