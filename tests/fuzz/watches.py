"""The ways in which a job is run with us: each is what a user would do, but for sizes, which are made small.

Slices of 1 KiB and calls of 1 KiB instead of 512 KiB and 1 MiB: everything that is done with large messages is done
with small ones, and a program costs little.
"""

import contextlib
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jobs import Stock
from programs import Program
from torch import distributed as dist
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))  # of a rank that Python itself starts

import small_messages
from lagom_overlap.collective import CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.collective.sites import Cycles, SiteSetting, cycles_of, role_cycles, site_of
from lagom_overlap.export.saved import SavedSettings, write_saved
from lagom_overlap.online import launch_session
from lagom_overlap.online.adapters.gloo import ADAPTERS
from lagom_overlap.online.device import engine_in_use
from lagom_overlap.online.routes import gloo, sibling
from lagom_overlap.online.routes.sibling_adapters import attach, attach_all_to_all
from lagom_overlap.online.tuner import OnlineTuner
from lagom_overlap.record import utc_now

LEAST_BYTES = 1 << 10
ONLINE = {"window_steps": 4, "max_steps": 64, "num_pairs": 3, "watch_steps": 4, "timeout_s": 60.0}
TUNERS = ("lagom", "lagom", "random")


def make_small() -> None:
    """Lets small messages be cut and searched."""
    small_messages.make_small(LEAST_BYTES, LEAST_BYTES)


class WithUs(Stock):
    """A job with us: what is known of it, and in how many of its calls a setting was in force."""

    def __init__(self) -> None:
        self._used_before = small_messages.num_used()
        self._stats: dict[str, Any] = {}

    @property
    def stats(self) -> dict[str, Any]:  # type: ignore[override]
        return self._stats | {"used": small_messages.num_used() - self._used_before}


_numbers = itertools.count()


def new_store() -> Any:
    """A prefix of its own in the job's store, the same on all ranks."""
    return dist.PrefixStore(f"fuzz{next(_numbers)}", dist.distributed_c10d._get_default_store())


def agreed(cycles: Cycles, names: Iterable[CommunicatorId], store: Any, number: int) -> Cycles:
    """Those that are the same on all ranks of their communicator, as the tuner has the ranks compare them."""
    same = {}
    for name in names:
        keys = cycles.get(name, ())
        where = f"cycle/{number}/{name}"
        store.set(f"{where}/{dist.get_rank()}", str([(key.kind, key.num_bytes) for key in keys]))
        same[name] = [f"{where}/{rank}" for rank in name.ranks]
    is_same = {name: len({store.get(place) for place in places}) == 1 for name, places in same.items()}
    return {name: keys for name, keys in cycles.items() if is_same[name]}


def options_of(program: Program) -> dict[str, Any]:
    """Windows as short as can be, each with other settings; saved ones are trusted, or judged at once."""
    rng = random.Random(program.seed)
    options = {**ONLINE, "tuner": rng.choice(TUNERS), "seed": program.seed % 1000, "deterministic": True}
    return options | {"check_share": rng.choice([0.0, 0.0, 0.5])}


def adapters_of(program: Program, model: nn.Module) -> list[str]:
    """Those that fit, and plain calls where the program is one of them or says so."""
    fitting = [name for name, adapter in ADAPTERS.items() if adapter.fits(model)]
    wants_calls = program.family in {"calls", "moe", "pipeline"} or program.has("calls_too")
    return [*fitting, "calls"] if wants_calls else fitting


class Route(WithUs):
    """The gloo route, driven by hand through every state: untouched, measured, set twice, back to default, closed."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program
        self._store = new_store()
        self._route = gloo.GlooRoute(self._store)
        self.calls: list[ConfigKey] = []
        """Of the last step that was measured, in the order of issue."""
        self._epoch = 0
        self._is_closed = False

    def on_model(self, model: nn.Module, optimizer: Any) -> None:
        for name in adapters_of(self._program, model):
            self._route.on_close(ADAPTERS[name].attach(model, self._route))

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        if number in {2, 4, 5} and not self._is_closed:
            self._switch({} if number == 5 else self._table(number))
        is_measured = number not in {0, 2, 5}
        self._route.begin_step(is_measured=is_measured)
        try:
            yield
        except BaseException:
            self.close()
            raise
        if is_measured:
            self.calls = [call.key for call in self._route.end_step().calls]
        if number == 5:
            self.close()

    def _table(self, number: int) -> dict[Any, CommConfig]:
        # An all-reduce of more than two ranks sums in another order when it is sliced: `deterministic` leaves it alone.
        keys = [key for key in self.calls if self._route.is_exact(key) and self._route.space(key) is not None]
        return {key: setting_of(key, f"{self._program.seed} {number}") for key in keys}

    def _switch(self, rows: dict[Any, CommConfig]) -> None:
        self._epoch += 1
        cycles = agreed(cycles_of(self.calls), self._route.communicators(), self._store, self._epoch)
        shared = {key: config for key, config in rows.items() if key.communicator in cycles}
        self._route.prepare(ConfigTable(shared, cycles=cycles), self._epoch)
        self._route.commit(self._epoch)

    def close(self) -> None:
        self._is_closed = True
        self._route.close()


def setting_of(key: Any, salt: str) -> CommConfig:
    """The same on all ranks, by the call's role."""
    site = site_of(key)
    rng = random.Random(f"{salt} {site.call.kind} {site.call.num_bytes} {site.occurrence} {site.call.description}")
    least = max(1 << 10, 4 * (site.call.num_bytes >> 10))  # a thousand slices a call would only be slow
    return CommConfig(num_channels=rng.choice([1, 2, 3]), chunk_bytes=rng.choice([1, 4, 16]) * least)


def end_of_groups(tuner: OnlineTuner | None) -> None:
    """As when a job destroys its groups: no step follows, nor the calls for which a setting was still lent."""
    if tuner is not None:
        tuner.release()
    route = getattr(tuner, "_collectives", None)
    if isinstance(route, gloo.GlooRoute) and route._is_closed:
        route._table = ConfigTable({})
        route._end_if_over()


class Tuned(WithUs):
    """`OnlineTuner`, searching, or with settings of an earlier run."""

    def __init__(self, program: Program, config: Path | None = None) -> None:
        super().__init__()
        self._program, self._config = program, config
        self._tuner: OnlineTuner | None = None
        self._adapters: list[str] = []
        self.states: set[str] = set()

    def on_model(self, model: nn.Module, optimizer: Any) -> None:
        self._adapters = adapters_of(self._program, model)
        options = options_of(self._program)
        self._tuner = OnlineTuner(model, optimizer, config=self._config, adapters=self._adapters, **options)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        assert self._tuner is not None
        with self._tuner.step():
            yield
        self.states.add(str(self._tuner.state))
        self.reason = self._tuner.reason

    def extra_step(self) -> contextlib.AbstractContextManager[None]:
        assert self._tuner is not None
        return self._tuner.step()

    def close(self) -> None:
        if self._tuner is not None:
            self._tuner.close()
            # Named functions stay routed until the window ends; here the next job follows at once, on all ranks.
            route = getattr(self._tuner, "_collectives", None)
            if route is not None and "calls" in self._adapters:
                route.close()
        self._stats = {"states": sorted(self.states), "reason": getattr(self, "reason", "")}

    def end(self) -> None:
        end_of_groups(self._tuner)


class Launched(WithUs):
    """What `lagom run --online` and `--observe` do in a rank."""

    def __init__(self, program: Program, mode: str, folder: Path, config: Path | None = None) -> None:
        super().__init__()
        rank = str(dist.get_rank())
        environment = {"LAGOM_RUN_MODE": mode, "LAGOM_RUN_FOLDER": str(folder), "RANK": rank}
        if config is not None:
            environment["LAGOM_RUN_CONFIG"] = str(config)
        options = options_of(program)
        launch_session.OnlineTuner = partial(OnlineTuner, **options)  # type: ignore[misc, assignment]
        self._events = folder / f"events.{rank}.jsonl"
        self._rank = launch_session.begin_session(os.environ | environment)

    def close(self) -> None:
        self._rank.close()
        launch_session.OnlineTuner = OnlineTuner  # type: ignore[misc]
        lines = [json.loads(line) for line in self._events.read_text().splitlines()] if self._events.exists() else []
        self._stats = {"states": sorted({line["state"] for line in lines if "state" in line})}

    def end(self) -> None:
        end_of_groups(getattr(self._rank._session, "_tuner", None))


class _Unmeasured:
    def begin(self) -> None:
        pass

    def mark_end(self) -> None:
        pass

    def end(self) -> tuple[float, None]:
        return 1.0, None


class _CountedSiblings(sibling.SiblingRoute):
    def group_for(self, kind: Any, num_bytes: int, group: Any) -> Any:
        chosen = super().group_for(kind, num_bytes, group)
        if chosen.group_desc.startswith("sibling_"):
            small_messages.count_used()
        return chosen


class Siblings(WithUs):
    """The route of sibling communicators; gloo stands for NCCL."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program
        self._route = _CountedSiblings("gloo", _Unmeasured(), _open_sibling)
        self._keys: list[ConfigKey] = []
        self._epoch = 0

    def on_model(self, model: nn.Module, optimizer: Any) -> None:
        attach(model, self._route)
        attach_all_to_all(self._route)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        if number in {2, 4} and self._keys:
            own = set(self._route.communicators())
            keys = [
                key
                for key in self._keys
                if len(key.communicator.ranks) == dist.get_world_size() and key.communicator in own
            ]
            channels: Callable[[int], int] = lambda i: 2 if number == 2 else (2, 4)[i % 2]  # noqa: E731
            rows = {key: CommConfig(num_channels=channels(i)) for i, key in enumerate(keys)}
            self._epoch += 1
            self._route.prepare(ConfigTable(rows, cycles=cycles_of(self._keys)), self._epoch)
            self._route.commit(self._epoch)
        self._route.begin_step(is_measured=number != 3)
        try:
            yield
        except BaseException:
            self._route.close()
            raise
        if number != 3:
            self._keys = [call.key for call in self._route.end_step().calls]
        if number == 5:
            self._route.close()

    def close(self) -> None:
        self._route.close()


def _open_sibling(group: dist.ProcessGroup, limits: Any) -> Any:
    return dist.new_group(dist.get_process_group_ranks(group), group_desc=f"sibling_{limits}")


def save_settings(path: Path, program: Program, calls: list[ConfigKey]) -> int:
    """Settings for all that a run was seen to call in a step, as `OnlineTuner.save` writes them; how many."""
    settings = [
        SiteSetting(site_of(key), setting_of(key, f"{program.seed} saved"))
        for key in calls
        if key.num_bytes >= LEAST_BYTES and (key.kind != "all_reduce" or len(key.communicator.ranks) == 2)
    ]
    settings.sort(key=lambda setting: setting.site)
    saved = SavedSettings(
        world_size=dist.get_world_size(),
        route="gloo",
        is_adopted=bool(settings),
        settings=tuple(settings),
        cycles=role_cycles(cycles_of(calls)),
        engine=engine_in_use(),
        verdict="as the fuzzer says",
        date=utc_now(),
    )
    write_saved(path, saved)
    return len(settings)
