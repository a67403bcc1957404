"""Simulated jobs under ten kinds of noise: how often the runtime adopts what is not faster, and what that costs.

    python benchmarks/online_noise.py null --jobs 100 --json        # 100 jobs for each kind of noise
    python benchmarks/online_noise.py slower | faster | saved | turned | settled

A job is a rank with a clock that we move; everything that decides is the runtime's own: `Member`, `Leader`, its search
and study, the sequential test, checks, the watcher of drift, the exchange through a store. Only the job is a formula:
three layers whose all-gather and reduce-scatter overlap a computation, 12 settings for each. Step times are the
formula's times a noise that knows nothing of the settings. The options are those that a user gets.

    null     no setting changes anything: an adoption is false
    slower   every setting costs 1 to 30 % of the step: an adoption is false, and steps on trial are lost
    faster   the best settings save 3 to 20 %
    saved    the job starts with saved settings that cost 0 to 15 %: they must leave
    turned   saved settings are trusted, save 5 %, and cost 5 % from a step on: they must leave
    settled  settings that change nothing are in force: what supervising them takes

*Lost* is the sum over all steps of the time above the default's, in default steps; *settled on* is what is set at the
end. An interval is Clopper and Pearson's, 95 %.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import product
from math import exp, pi, sin
from random import Random
from statistics import fmean, median
from typing import Any, Final

from scipy.stats import beta

from lagom_overlap.collective import (
    CollectiveKind,
    CommConfig,
    CommunicatorId,
    ConfigKey,
    ConfigSpace,
    ConfigTable,
    Subspace,
)
from lagom_overlap.collective.sites import SiteSetting, site_of
from lagom_overlap.online.options import OnlineOptions
from lagom_overlap.online.ranks import exchange as exchange_module
from lagom_overlap.online.ranks.exchange import Exchange
from lagom_overlap.online.ranks.leader import Leader
from lagom_overlap.online.ranks.member import Member
from lagom_overlap.online.ranks.messages import SETTLED, Report, SwitchState, WindowPlan
from lagom_overlap.online.ranks.search import study_factory
from lagom_overlap.online.routes.base import CallCount, CallRecord, StepRecord

CHANNELS: Final = (1, 2, 4, 8)
CHUNKS: Final = (1 << 19, 1 << 20, 1 << 21)
SPACE: Final = ConfigSpace((Subspace(num_channels=CHANNELS, chunk_bytes=CHUNKS),))
WORLD: Final = CommunicatorId(description="fsdp", ranks=(0, 1))
NUM_LAYERS: Final = 3
KEYS: Final = tuple(
    ConfigKey(communicator=WORLD, kind=kind, num_bytes=num_bytes, occurrence=layer)
    for layer in range(NUM_LAYERS)
    for kind, num_bytes in ((CollectiveKind.ALL_GATHER, 8 << 20), (CollectiveKind.REDUCE_SCATTER, 16 << 20))
)
COMM_S: Final = (0.02, 0.04)
LAYER_S: Final = 0.06
STEP_S: Final = NUM_LAYERS * LAYER_S
TURNS_AT: Final = 3000
"""Of `turned`."""

Noise = Callable[[Random], Iterator[float]]


# Noise: factors of a step's time, one after the other. ------------------------------------------------------------


def white(rng: Random) -> Iterator[float]:
    """2 %, independent."""
    while True:
        yield exp(rng.gauss(0, 0.02))


def heavy_tails(rng: Random) -> Iterator[float]:
    """Student's t of 1.5 degrees of freedom, which has no variance; cut at a step of three times the time."""
    while True:
        scale = max(1e-9, rng.gammavariate(0.75, 4 / 3)) ** 0.5
        yield exp(max(-0.5, min(1.1, 0.01 * rng.gauss(0, 1) / scale)))


def drift(rng: Random) -> Iterator[float]:
    """A creep, up or down, of up to 40 % in 3000 steps."""
    slope, number = rng.uniform(-0.4, 0.4) / 3000, 0
    while True:
        yield exp(rng.gauss(0, 0.01) + max(-0.7, min(0.7, slope * number)))
        number += 1


def steps(rng: Random) -> Iterator[float]:
    """Levels that jump by some 5 % once in 100 steps."""
    level = 0.0
    while True:
        if rng.random() < 0.01:
            level = max(-0.5, min(0.5, level + rng.gauss(0, 0.05)))
        yield exp(level + rng.gauss(0, 0.01))


def spikes(rng: Random) -> Iterator[float]:
    """Every 3rd to 60th step takes 1.2 to 3 times as long: checkpoints, logging, a cron job."""
    period, size, number = rng.randint(3, 60), rng.uniform(1.2, 3.0), rng.randrange(60)
    while True:
        yield exp(rng.gauss(0, 0.01)) * (size if number % period == 0 else 1.0)
        number += 1


def autocorrelated(rng: Random) -> Iterator[float]:
    """An autoregression of 0.95."""
    state = rng.gauss(0, 0.03)
    while True:
        state = 0.95 * state + rng.gauss(0, 0.01)
        yield exp(state)


def clock_ramps(rng: Random) -> Iterator[float]:
    """A clock that runs up to 5 % fast, slews back, and does so again every 40 to 400 steps."""
    number = 0
    length = rng.randint(40, 400)
    while True:
        if number == length:
            number, length = 0, rng.randint(40, 400)
        yield exp(rng.gauss(0, 0.005)) * (1 + 0.05 * number / length)
        number += 1


def bimodal(rng: Random) -> Iterator[float]:
    """One step in three takes 15 % longer."""
    while True:
        yield exp(rng.gauss(0, 0.01)) * (1.15 if rng.random() < 1 / 3 else 1.0)


def stragglers(rng: Random) -> Iterator[float]:
    """One step in twenty waits for a late rank."""
    while True:
        yield exp(rng.gauss(0, 0.005)) * (1 + (rng.expovariate(2) if rng.random() < 0.05 else 0.0))


def swing(rng: Random) -> Iterator[float]:
    """A neighbour with a period of 8 to 80 steps, 10 % up and down; the regime also changes at every adoption."""
    period, number = rng.uniform(8, 80), rng.random() * 80
    while True:
        yield exp(rng.gauss(0, 0.01)) * (1 + 0.1 * sin(2 * pi * number / period))
        number += 1


NOISES: Final[dict[str, Noise]] = {
    "white, 2 %": white,
    "heavy tails": heavy_tails,
    "drift": drift,
    "steps": steps,
    "periodic spikes": spikes,
    "autocorrelated": autocorrelated,
    "clock ramps": clock_ramps,
    "bimodal": bimodal,
    "stragglers": stragglers,
    "regime change at adoption": swing,
}
REGIME: Final = 1.15
"""Under the last kind, the factor by which all steps become longer, whatever is set, when settings are adopted."""


# What settings do. --------------------------------------------------------------------------------------------------

Effect = Callable[[ConfigTable, int], float]
"""The factor of the step's time under a table, at a step; 1 is the default's."""


def nothing(_rng: Random) -> Effect:
    """No setting changes anything."""
    return lambda table, step: 1.0


def _by_setting(costs: dict[tuple[CollectiveKind, CommConfig], float]) -> Effect:
    """A setting that leaves a knob alone costs the mean over that knob's values."""

    @cache
    def cost(kind: CollectiveKind, config: CommConfig) -> float:
        meant = (
            each
            for (of, one), each in costs.items()
            if of is kind
            and config.num_channels in (None, one.num_channels)
            and config.chunk_bytes in (None, one.chunk_bytes)
        )
        return fmean(meant)

    def effect(table: ConfigTable, step: int) -> float:
        found = [cost(key.kind, config) for key in KEYS if (config := table.get(key)) is not None]
        return 1 + sum(found) / len(KEYS) * 2

    return effect


def all_slower(rng: Random) -> Effect:
    """Each setting of each collective costs 1 to 30 % of the step, half of it for either."""
    configs = [CommConfig(num_channels=n, chunk_bytes=c) for n, c in product(CHANNELS, CHUNKS)]
    kinds = {key.kind for key in KEYS}
    return _by_setting({(kind, one): rng.uniform(0.01, 0.30) / 2 for kind in sorted(kinds) for one in configs})


def some_faster(rng: Random) -> Effect:
    """The best setting saves 3 to 20 %; the further from it, the less, down to 20 % lost."""
    gain, best = rng.uniform(0.03, 0.20), (rng.randrange(4), rng.randrange(3))
    kinds = sorted({key.kind for key in KEYS})
    costs = {
        (kind, CommConfig(num_channels=n, chunk_bytes=c)): -gain / 2 + 0.05 * (abs(i - best[0]) + abs(j - best[1]))
        for kind in kinds
        for i, n in enumerate(CHANNELS)
        for j, c in enumerate(CHUNKS)
    }
    return _by_setting(costs)


def bad_saved(rng: Random) -> Effect:
    """Whatever is set costs 0 to 15 %, nothing helps."""
    cost = rng.uniform(0.0, 0.15)
    return lambda table, step: 1 + cost if len(table) else 1.0


def turned(_rng: Random) -> Effect:
    """Whatever is set saves 5 % at first, and costs 5 % from `TURNS_AT` on."""
    return lambda table, step: 1.0 if not len(table) else 0.95 if step < TURNS_AT else 1.05


SAVED: Final = tuple(SiteSetting(site_of(key), CommConfig(num_channels=4, chunk_bytes=1 << 20)) for key in KEYS)


# The job. ------------------------------------------------------------------------------------------------------------


class Inline:
    """In place of the thread that bounds a call to the store: this one never waits."""

    def __init__(self, _name: str) -> None:
        pass

    def start(self, work: Callable[[], Any]) -> Future[Any]:
        """Done when it returns."""
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future

    def call(self, work: Callable[[], Any], _timeout_s: float) -> Any:
        """The call itself."""
        return work()

    def close(self) -> None:
        """Nothing to free."""


class Store:
    """A dictionary, as the job's store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        """Writes."""
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        """Reads."""
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Reads several."""
        return [self.values[key] for key in keys]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Everything is there, for one rank."""
        assert all(key in self.values for key in keys), keys

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Writes if there is nothing."""
        return self.values.setdefault(key, desired.encode())

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Counts."""
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total

    def delete_key(self, key: str) -> bool:
        """Forgets."""
        return self.values.pop(key, None) is not None


@dataclass
class Job:
    """Implements `Route`, and steps; `found` counts as it goes."""

    effect: Effect
    noise: Iterator[float]
    rng: Random
    changes_regime: bool = False
    name: str = "simulated"
    description: str = "formulas"
    now_s: float = 0.0
    step: int = 0
    level: float = 1.0
    table: ConfigTable = field(default_factory=lambda: ConfigTable({}))
    prepared: ConfigTable | None = None
    record: StepRecord | None = None
    lost_steps: float = 0.0
    is_measured: bool = False

    def communicators(self) -> tuple[CommunicatorId, ...]:
        """One."""
        return (WORLD,)

    def space(self, key: ConfigKey) -> ConfigSpace | None:
        """The same for all."""
        return SPACE

    def is_exact(self, key: ConfigKey) -> bool:
        """Nothing is summed."""
        return True

    def counts(self) -> dict[CommunicatorId, CallCount]:
        """One rank stands as it stands."""
        return {WORLD: CallCount("world", self.step)}

    def settle(self) -> None:
        """Nothing was opened."""

    def prepare(self, table: ConfigTable, epoch: int) -> None:
        """Cannot fail."""
        self.prepared = table

    def commit(self, epoch: int) -> None:
        """Sets."""
        assert self.prepared is not None
        self.table = self.prepared

    def begin_step(self, *, is_measured: bool) -> None:
        """Notes whether the calls are to be measured."""
        self.is_measured = is_measured

    def mark_end(self) -> None:
        """The step's own end is it."""

    def goes_on(self) -> bool:
        """Never."""
        return False

    def end_step(self) -> StepRecord:
        """The step just run."""
        assert self.record is not None
        return self.record

    def close(self) -> None:
        """Nothing is set any more."""
        self.table = ConfigTable({})

    def run(self) -> None:
        """A step: what is set decides its length, the noise stretches it, and each call has some of its own."""
        factor = self.level * next(self.noise)
        effect = self.effect(self.table, self.step)
        took_s = STEP_S * factor * effect
        self.lost_steps += effect - 1
        if self.is_measured:
            calls, at = [], 0.0
            for layer in range(NUM_LAYERS):
                end, begun = at + took_s / NUM_LAYERS, at
                for place in range(2):
                    length = COMM_S[place] * factor * effect * exp(self.rng.gauss(0, 0.01))
                    calls.append(
                        CallRecord(
                            key=KEYS[2 * layer + place],
                            issued_s=at,
                            begun_s=begun,
                            ended_s=begun + length,
                            joined_s=at + 0.8 * (end - at),
                            resumed_s=end,
                        )
                    )
                    begun += length
                at = end
            self.record = StepRecord(duration_s=took_s, calls=tuple(calls))
        self.now_s += took_s
        self.step += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One job: `verdicts` of its searches that adopted, of how many; steps of each state; what is set at the end."""

    num_searches: int
    num_adopted: int
    is_set: bool
    lost_steps: float
    num_checked: int
    num_settled: int
    left_at: int
    effect_at_end: float


def run(kind: str, noise: str, seed: int, num_steps: int) -> Outcome:
    """One job, from its first step on."""
    rng = Random(f"{kind}/{noise}/{seed}")
    effects = {
        "null": nothing,
        "slower": all_slower,
        "faster": some_faster,
        "saved": bad_saved,
        "turned": turned,
        "settled": nothing,
    }
    is_trusted = kind in ("turned", "settled")
    options = OnlineOptions(seed=seed, max_steps=0 if kind in ("saved", "turned", "settled") else 1000)
    job = Job(effects[kind](rng), NOISES[noise](Random(rng.random())), Random(rng.random()))
    leader = Leader(
        options,
        study_factory(options),
        num_ranks=1,
        route_name="simulated",
        started=SAVED if kind == "saved" or is_trusted else (),
    )
    exchange = Exchange(Store(), rank=0, num_ranks=1, timeout_s=9.0)
    member = Member(exchange, job, leader=leader, clock=lambda: job.now_s)

    def trusted(settings: tuple[SiteSetting, ...], _report: Report | None, words: str) -> WindowPlan:
        leader._known.started = ()
        return leader._watch.settle(settings, words, None)

    if is_trusted:
        leader._begin_with = trusted  # type: ignore[method-assign]
    searched, adopted, checked, settled, left_at, was_set = set(), set(), 0, 0, 0, False
    for step in range(num_steps):
        member.begin_step()
        state = member.plan.state
        if state is SwitchState.VERDICT:
            searched.add(id(leader.study))
        if state in SETTLED and member.plan.is_adopted and leader.study is not None:
            if id(leader.study) not in adopted and noise == "regime change at adoption":
                job.level *= REGIME
            adopted.add(id(leader.study))
        settled += state in (*SETTLED, SwitchState.CHECK)
        checked += state is SwitchState.CHECK
        is_set = bool(member.settings)
        if was_set and not is_set and state not in (SwitchState.CHECK,):
            left_at = step
        was_set = is_set or (was_set and state is SwitchState.CHECK)
        job.run()
        member.end_step()
    last = job.effect(job.table, job.step) if member.plan.state is not SwitchState.CHECK else 1.0
    return Outcome(
        num_searches=len(searched),
        num_adopted=len(adopted & searched) if kind not in ("saved", "turned", "settled") else 0,
        is_set=bool(member.settings),
        lost_steps=job.lost_steps,
        num_checked=checked,
        num_settled=settled,
        left_at=left_at,
        effect_at_end=last,
    )


def interval(count: int, total: int) -> tuple[float, float]:
    """Clopper and Pearson's, 95 %."""
    low = beta.ppf(0.025, count, total - count + 1) if count else 0.0
    high = beta.ppf(0.975, count + 1, total - count) if count < total else 1.0
    return float(low), float(high)


def row(kind: str, noise: str, jobs: int, num_steps: int) -> dict[str, Any]:
    """The jobs of one kind of noise."""
    outcomes = [run(kind, noise, seed, num_steps) for seed in range(jobs)]
    searches = sum(one.num_searches for one in outcomes)
    lost = sorted(one.lost_steps for one in outcomes)
    left = [one.left_at for one in outcomes if one.left_at and not one.is_set]
    return {
        "noise": noise,
        "jobs": jobs,
        "searches": searches,
        "adopted": sum(one.num_adopted for one in outcomes),
        "set_at_end": sum(one.is_set for one in outcomes),
        "slower_at_end": sum(one.effect_at_end > 1.005 for one in outcomes),
        "lost_median": median(lost),
        "lost_mean": fmean(lost),
        "lost_95": lost[max(0, round(0.95 * len(lost)) - 1)],
        "left_median": median(left) if left else None,
        "checked_share": sum(one.num_checked for one in outcomes) / max(1, sum(one.num_settled for one in outcomes)),
    }


def main() -> None:
    """Prints a row for each kind of noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("null", "slower", "faster", "saved", "turned", "settled"))
    parser.add_argument("--jobs", type=int, default=100, help="for each kind of noise")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--noise", choices=NOISES, action="append")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    logging.disable(logging.CRITICAL)
    exchange_module.BoundedCalls = Inline  # type: ignore[assignment, misc]
    total, adopted = 0, 0
    for noise in chosen.noise or NOISES:
        began = time.perf_counter()
        found = row(chosen.kind, noise, chosen.jobs, chosen.steps)
        total, adopted = total + found["searches"], adopted + found["adopted"]
        if chosen.json:
            print(json.dumps(found), flush=True)
            continue
        words = ", ".join(
            f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
        )
        print(f"{words} ({time.perf_counter() - began:.0f} s)", flush=True)
    if total:
        low, high = interval(adopted, total)
        print(
            f"adopted {adopted} of {total} searches: {adopted / total:.2%} ({low:.2%} to {high:.2%})", file=sys.stderr
        )


if __name__ == "__main__":
    main()
