"""A tuner that cannot begin, settings it begins with, and saving after the job's process group is gone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread

import msgspec
import pytest

pytest.importorskip("torch")

from job_of_threads import FakeStore, Job, SimulatedRoute
from test_online_files import CALL, SAVED, SETTING
from torch import distributed as dist

from lagom_overlap import __version__
from lagom_overlap.collective import CollectiveKind, CommConfig
from lagom_overlap.collective.sites import CallType, Site, SiteSetting
from lagom_overlap.errors import BundleError
from lagom_overlap.export.run_variables import MODE_VARIABLE
from lagom_overlap.export.saved import read_saved, write_saved
from lagom_overlap.online import device, job_store
from lagom_overlap.online import tuner as online
from lagom_overlap.online.adapters import gloo
from lagom_overlap.online.graph_captures import GraphCaptures
from lagom_overlap.online.job_profiler import OWN_PROFILER, OwnProfiler
from lagom_overlap.online.ranks.exchange import Exchange, Store
from lagom_overlap.online.ranks.messages import SwitchState, WindowPlan
from lagom_overlap.online.ranks.presence import say_here, say_off
from lagom_overlap.online.replaced_ranks import ReplacedRanks
from lagom_overlap.online.routes.base import StepRecord
from lagom_overlap.online.tuner import OnlineTuner

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def own_profiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnProfiler]:
    own = OwnProfiler()
    monkeypatch.setattr(online, "OWN_PROFILER", own)
    yield own
    own.unwatch()


ENGINE = "ProcessGroupGloo of torch 9.9"


class Unreachable(dist.HashStore):
    """A store to which no further connection can be made: its process has ended."""

    def clone(self) -> None:
        Event().wait()


def test_a_store_that_cannot_be_reached_again_holds_up_no_rank_that_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the fault matrix: with rank 0 killed as tuners begin, the others waited for three minutes."""
    shared = Unreachable()
    monkeypatch.setattr(job_store, "_get_default_store", lambda: shared)
    job_store.store_of("7", 0.01).set("key", "value")
    assert shared.get("lagom/7/key") == b"value"


class World:
    """A process group of two ranks, of which this process is one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
        self.store = FakeStore()
        self.rank = rank
        monkeypatch.setattr(online.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(online, "nccl_in_use", lambda: None)  # a torch with CUDA would ask the process group
        monkeypatch.setattr(online, "engine_in_use", lambda: ENGINE)
        monkeypatch.setattr(online.dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(online.dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(online, "store_of", lambda name, timeout_s: self.store)
        monkeypatch.setattr(online.atexit, "register", lambda *_: None)

    def plan_of_the_other(self, window: int) -> tuple[SwitchState, str]:
        plan = Exchange(self.store, rank=1 - self.rank, num_ranks=2, timeout_s=0.1).plan(window)
        return plan.state, plan.reason


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tuner_that_cannot_begin_takes_its_hands_off_and_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    world, route = World(monkeypatch, rank), SimulatedRoute(rank, 2)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no thread can be started")

    monkeypatch.setattr(online, "Member", fail)
    with pytest.raises(RuntimeError, match="no thread can be started"):
        OnlineTuner(online.nn.Linear(1, 1), route=route)
    assert route.is_closed
    assert world.plan_of_the_other(0) == (SwitchState.OFF, f"rank {rank}: it could not begin")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_threads_says_that_it_is_off_by_the_jobs_own_connection(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Else the others would wait for it, longer than their own calls may take."""
    world, base = World(monkeypatch, rank), dist.HashStore()
    monkeypatch.setattr(job_store, "_get_default_store", lambda: base)
    monkeypatch.setenv(MODE_VARIABLE, "online")
    here = dist.PrefixStore("lagom/here", base)
    say_here(here, rank, "online", __version__)

    def fail(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as without_threads:
        without_threads.setattr(Thread, "start", fail)
        tuner = OnlineTuner(online.nn.Linear(1, 1), route=SimulatedRoute(rank, 2))
    why = "found that the job's store does not answer: can't start new thread"
    assert (tuner.state, tuner.reason) == (SwitchState.OFF, f"rank {rank}: it {why}")
    assert here.get(f"here/{rank}").decode() == f"{__version__} off ({why})"
    name = next(name for name in range(100_000) if base.check([f"lagom/{name}/plan/0"]))
    world.store = dist.PrefixStore(f"lagom/{name}", base)
    assert [world.plan_of_the_other(window) for window in (0, 1)] == [(SwitchState.OFF, f"rank {rank}: it {why}")] * 2


class Mute(dist.Store):
    """A store that answers nothing: what holds it has been stopped, or another wait holds the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = Event()

    def set(self, *_: object) -> None:
        self.is_over.wait()

    def compare_set(self, *_: object) -> bytes:
        self.is_over.wait()
        return b""


@pytest.mark.parametrize("say", [say_here, partial(say_off, why="it cannot go on")])
def test_a_store_that_does_not_answer_holds_up_no_rank_that_says_how_it_takes_part(
    monkeypatch: pytest.MonkeyPatch, say: Callable[[Store, int, str, str], None]
) -> None:
    """What calls it may be that very silence: the job goes on without us."""
    World(monkeypatch, 0)
    store = Mute()
    monkeypatch.setattr(job_store, "_get_default_store", lambda: store)
    monkeypatch.setattr(job_store, "longest_wait_s", lambda: 0.05)
    monkeypatch.setenv(MODE_VARIABLE, "online")
    telling = Thread(target=lambda: job_store.tell_others(say), daemon=True)
    telling.start()
    telling.join(30.0)
    is_held_up = telling.is_alive()
    store.is_over.set()
    assert not is_held_up


def test_two_tuners_of_one_process_share_no_key_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each speaks under a name of its own, whatever it opens: what one rank tells the first, the second never reads."""
    world = World(monkeypatch, 0)
    names: list[str] = []
    stores: dict[str, FakeStore] = {}

    def store_of(name: str, timeout_s: float) -> FakeStore:
        names.append(name)
        return stores.setdefault(name, FakeStore())

    monkeypatch.setattr(online, "store_of", store_of)
    of_tuner: list[set[str]] = []
    for _ in range(2):
        names.clear()
        tuner = OnlineTuner(online.nn.Linear(1, 1), route=SimulatedRoute(world.rank, 2))
        of_tuner.append(set(names))
        tuner.close()
    first, second = of_tuner
    assert first
    assert second
    assert not first & second


def test_an_engine_that_cannot_be_told_keeps_nobody_waiting_and_is_asked_of_no_tuner_that_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, 1)

    def no_backend() -> str:
        raise RuntimeError("no backend type associated with device type cpu")

    monkeypatch.setattr(online, "engine_in_use", no_backend)
    assert OnlineTuner(online.nn.Linear(1, 1), route=SimulatedRoute(1, 2), enabled=False).state is SwitchState.OFF
    world.store = FakeStore()
    with pytest.raises(RuntimeError, match="no backend type"):
        OnlineTuner(online.nn.Linear(1, 1), route=SimulatedRoute(1, 2))
    assert world.plan_of_the_other(0) == (SwitchState.OFF, "rank 1: it could not begin")


def test_steps_of_a_job_on_gpus_are_timed_by_events_of_the_device_that_its_model_is_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host's clock does not tell how long a step takes there."""
    World(monkeypatch, 0)
    events: list[object] = []

    class Event:
        def __init__(self, device: object) -> None:
            events.append(device)

        def record(self) -> None:
            pass

    monkeypatch.setattr(device, "_trained", [])
    monkeypatch.setattr(online, "job_device", lambda: ("device of", device._device_of_model()))
    monkeypatch.setattr(online, "DeviceEvent", Event)
    model = online.nn.Linear(1, 1)
    tuner = OnlineTuner(model, route=SimulatedRoute(0, 2))
    assert tuner._member is not None
    tuner._member._steps.begin()
    assert events == [("device of", model.weight.device)]
    OWN_PROFILER.unwatch()


def test_a_job_with_collectives_in_a_cuda_graph_is_measured_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    World(monkeypatch, 0)

    class Graph:
        def capture_begin(self) -> None:
            pass

        def capture_end(self) -> None:
            pass

    captures = GraphCaptures(Graph)
    monkeypatch.setattr(online, "GRAPH_CAPTURES", captures)
    tuner = OnlineTuner(online.nn.Linear(1, 1), route=SimulatedRoute(0, 2))
    assert tuner._member is not None
    captures.watch(lambda: None, lambda: True)
    assert tuner._member._why_not() == ""
    graph = Graph()
    graph.capture_begin()
    graph.capture_end()
    assert "a CUDA graph holds collectives" in tuner._member._why_not()
    OWN_PROFILER.unwatch()


def test_ranks_that_come_to_be_replaced_take_the_tuner_off(monkeypatch: pytest.MonkeyPatch) -> None:
    World(monkeypatch, 0)
    tuner = OnlineTuner(online.nn.Linear(1, 1), route=SimulatedRoute(0, 2))
    assert tuner._member is not None
    replaced = ReplacedRanks()
    monkeypatch.setattr(online, "REPLACED_RANKS", replaced)
    assert tuner._member._why_stop() == ""
    replaced.by = "torchft"
    assert tuner._member._why_stop() == "torchft replaces ranks while the others run on"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wish_to_stop_is_asked_for_before_a_report_and_takes_all_off(rank: int) -> None:
    job = Job()
    job.start()
    job.run(7)
    assert job.members[0].plan.state is not SwitchState.OFF
    job.members[rank]._why_stop = lambda: "LAGOM_DISABLE is set"
    job.run(10)
    assert job.plans[0] == job.plans[1]
    assert job.plans[0][-1][0] == SwitchState.OFF
    assert f"rank {rank}: LAGOM_DISABLE is set" in job.members[1 - rank].plan.reason


def test_in_a_forked_child_the_tuner_says_nothing_to_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    World(monkeypatch, 0)
    said = []
    tuner = OnlineTuner(online.nn.Linear(1, 1), route=SimulatedRoute(0, 2))
    for word in ("leave", "stop", "begin_step"):
        monkeypatch.setattr(tuner._member, word, lambda *_, word=word: said.append(word))
    monkeypatch.setattr(online.os, "getpid", lambda: -1)
    with tuner.step():
        pass
    tuner.freeze()
    tuner.close()
    assert not said
    monkeypatch.undo()
    assert tuner._own is not None


def test_an_adapter_that_cannot_attach_takes_back_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    undone = []

    class Fits:
        name = "fsdp2"

        def attach(self, model: object, route: object) -> object:
            return lambda: undone.append(self.name)

    class Breaks:
        name = "ddp"

        def attach(self, model: object, route: object) -> object:
            raise TypeError("another torch")

    world = World(monkeypatch, 1)
    monkeypatch.setattr(gloo, "ADAPTERS", {"fsdp2": Fits(), "ddp": Breaks()})
    with pytest.raises(TypeError, match="another torch"):
        OnlineTuner(online.nn.Linear(1, 1), adapters=["fsdp2", "ddp"])
    assert undone == ["fsdp2"]
    assert world.plan_of_the_other(1)[0] is SwitchState.OFF


def test_what_is_saved_needs_no_process_group_any_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    World(monkeypatch, 0)
    tuner = OnlineTuner(online.nn.Linear(1, 1), route=SimulatedRoute(0, 2))
    tuner._member._window.plan = WindowPlan(window=9, state=SwitchState.DONE, reason="settled")

    def gone() -> int:
        raise ValueError("Default process group has not been initialized")

    monkeypatch.setattr(online.dist, "get_rank", gone)
    assert tuner.save(tmp_path / "lagom.json")
    assert read_saved(tmp_path / "lagom.json", engine=ENGINE).world_size == 2


def test_a_route_that_profiles_steps_aside_for_the_jobs_profiler_and_never_profiles_two_steps_in_a_row(
    monkeypatch: pytest.MonkeyPatch, own_profiler: OwnProfiler
) -> None:
    World(monkeypatch, 0)
    route = SimulatedRoute(0, 2)
    measured = []
    route.begin_step = lambda *, is_measured: measured.append(is_measured)
    tuner = OnlineTuner(online.nn.Linear(1, 1), route=route)
    for _ in range(4):
        with tuner.step():
            route.record = StepRecord(duration_s=1.0, calls=())
    assert measured == [False, True, False, True]
    assert own_profiler.why_not() == ""
    with online.torch.profiler.profile(schedule=lambda _: online.torch.profiler.ProfilerAction.NONE):
        assert tuner._member._why_not() == "the job has a profiler of its own"


def test_deterministic_holds_for_saved_settings_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scatter = CallType(
        description="tp", num_ranks=2, creation_order=1, kind=CollectiveKind.REDUCE_SCATTER, num_bytes=CALL.num_bytes
    )
    settings = (SETTING, SiteSetting(Site(scatter, 0), CommConfig(num_channels=8)))
    path = tmp_path / "lagom.json"
    saved = msgspec.structs.replace(SAVED, world_size=2, engine=ENGINE)
    write_saved(path, msgspec.structs.replace(saved, settings=settings))
    assert online._started(path, 2, ENGINE, None) == (settings, (), 0)
    assert online._started(path, 2, ENGINE, SimulatedRoute(0, 2).is_exact) == ((SETTING,), (), 0)
    assert online._started(path, 2, "ProcessGroupNCCL2 of torch 9.9", None) == ((), (), 0)
    assert "were found under ProcessGroupGloo of torch 9.9, this job runs ProcessGroupNCCL2" in caplog.text
    World(monkeypatch, 0)
    started = OnlineTuner(online.nn.Linear(1, 1), route=SimulatedRoute(0, 2), config=path, deterministic=True)
    assert started._member._leader._known.started == (SETTING,)
    assert "1 of 2 saved settings are left out, they could reorder a reduction" in caplog.text
    alone = SiteSetting(Site(replace(scatter, num_ranks=1), 0), CommConfig(num_channels=8))
    write_saved(path, msgspec.structs.replace(saved, settings=(alone,)))
    assert online._started(path, 2, ENGINE, SimulatedRoute(0, 2).is_exact) == ((), (), 0)
    assert "searching as if there were none" in caplog.text


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_config_that_is_no_file_is_refused_before_the_first_step_and_nothing_is_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    world, route = World(monkeypatch, 0), SimulatedRoute(0, 2)
    with pytest.raises(BundleError, match="is no file; give one that OnlineTuner"):
        OnlineTuner(online.nn.Linear(1, 1), route=route, config=tmp_path / name)
    assert route.is_closed
    assert world.plan_of_the_other(0) == (SwitchState.OFF, "rank 0: it could not begin")
    world.rank = 1
    assert OnlineTuner(online.nn.Linear(1, 1), route=SimulatedRoute(1, 2), config=tmp_path / name).save("x") is False
