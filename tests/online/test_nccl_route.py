"""Which route a job on NCCL takes, and what is said where it has none."""

from pathlib import Path

import pytest
from c_build import build_libraries

torch = pytest.importorskip("torch")

from lagom_overlap.collective import ConfigTable  # noqa: E402
from lagom_overlap.errors import BackendError, JobError, LagomError  # noqa: E402
from lagom_overlap.nccl_plugin.library import TunerPlugin  # noqa: E402
from lagom_overlap.nccl_plugin.table_writer import encode_table  # noqa: E402
from lagom_overlap.online import device  # noqa: E402
from lagom_overlap.online.device import nccl_in_use  # noqa: E402
from lagom_overlap.online.graph_captures import GraphCaptures  # noqa: E402
from lagom_overlap.online.guest import safely  # noqa: E402
from lagom_overlap.online.replaced_ranks import ReplacedRanks  # noqa: E402
from lagom_overlap.online.routes import nccl as nccl_route  # noqa: E402
from lagom_overlap.online.routes.connections import Connections  # noqa: E402
from lagom_overlap.online.routes.nccl import open_nccl_route  # noqa: E402
from lagom_overlap.online.routes.plugin import PluginRoute  # noqa: E402
from lagom_overlap.online.routes.plugin_owner import PLUGIN_OWNER  # noqa: E402
from lagom_overlap.online.routes.plugin_timer import KernelTimer  # noqa: E402
from lagom_overlap.online.routes.profile_timer import ProfileTimer  # noqa: E402
from lagom_overlap.units import MIB  # noqa: E402

pytestmark = pytest.mark.torch
MODEL = torch.nn.Linear(2, 2)


@pytest.fixture
def environment(tmp_path, tmp_path_factory):
    plugin, _ = build_libraries(tmp_path_factory)
    return {
        "NCCL_TUNER_PLUGIN": str(plugin),
        "LAGOM_RECORD": str(tmp_path / "record.%r.bin"),
        "RANK": "3",
    }


@pytest.mark.parametrize("nccl", [(2, 21, 5), (2, 30, 7), (2, 32, 6)])
def test_a_release_with_a_tuner_takes_the_plug_in_with_this_ranks_files(environment, tmp_path, nccl):
    route = open_nccl_route(MODEL, nccl, environment)
    assert route.name == "plugin"
    assert route._record == tmp_path / "record.3.bin"
    assert route.communicators() == ()  # NCCL has made none yet


def test_a_graph_that_the_job_captures_is_told_to_the_plug_in(environment, monkeypatch):
    class Graph:
        def capture_begin(self):
            assert told == ["begin"]

        def capture_end(self):
            assert told == ["begin"]

    told = []
    monkeypatch.setattr(nccl_route, "GRAPH_CAPTURES", GraphCaptures(Graph))
    monkeypatch.setattr(PluginRoute, "begin_capture", lambda self: told.append("begin"))
    monkeypatch.setattr(PluginRoute, "end_capture", lambda self: bool(told.append("end")))
    route = open_nccl_route(MODEL, (2, 30, 7), environment)
    graph = Graph()
    graph.capture_begin()
    graph.capture_end()
    assert told == ["begin", "end"]
    route.close()


def test_free_memory_is_asked_of_the_jobs_device_which_need_not_be_the_current_one(environment, monkeypatch):
    """Under srun GPU 0 is current on every rank; the question comes from a thread of ours besides."""
    made = []

    def connections(free_bytes, **options):
        made.append(free_bytes)
        return Connections(free_bytes, **options)

    monkeypatch.setattr(nccl_route, "Connections", connections)
    monkeypatch.setattr(nccl_route, "job_device", lambda: torch.device("cuda", 5))
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device=None: (getattr(device, "index", 0) * MIB, 80_000 * MIB)
    )
    open_nccl_route(MODEL, (2, 30, 7), environment).close()
    (free_bytes,) = made
    assert free_bytes() == 5 * MIB


@pytest.mark.parametrize(
    ("nccl", "changed", "words"),
    [
        ((2, 27, 3), {}, ""),
        ((2, 30, 7), {}, ""),
        ((2, 24, 3), {}, "NCCL 2.24.3 reports no times of the GPU"),
        ((2, 30, 7), {"NCCL_PROFILER_PLUGIN": "/site/libprofiler.so"}, "NCCL_PROFILER_PLUGIN is /site/libprofiler.so"),
        ((2, 30, 7), {"NCCL_PROFILER_PLUGIN": ""}, "are not both set: lagom run does that"),
        ((2, 30, 7), {"LAGOM_PROFILE": ""}, "are not both set"),
    ],
)
def test_steps_are_timed_by_nccls_profiler_where_the_job_was_started_with_ours(
    environment, tmp_path, caplog, *, nccl, changed, words
):
    ours = {"NCCL_PROFILER_PLUGIN": environment["NCCL_TUNER_PLUGIN"], "LAGOM_PROFILE": str(tmp_path / "profile.%r")}
    for rank in ("3", "0"):
        route = open_nccl_route(MODEL, nccl, environment | ours | changed | {"RANK": rank})
        assert isinstance(route._timer, KernelTimer if words else ProfileTimer)
        route.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(words)  # rank 0 says it for all
    assert all(words in line and "are timed by PyTorch's profiler" in line for line in lines)


def test_siblings_are_taken_where_there_is_no_tuner_or_the_user_says_so(environment):
    for nccl, env in (((2, 19, 3), {}), ((2, 30, 7), environment | {"LAGOM_ROUTE": "sibling"})):
        original = torch.distributed.all_to_all_single
        route = open_nccl_route(MODEL, nccl, env)
        assert route.name == "sibling"
        assert torch.distributed.all_to_all_single is not original
        route.close()
        assert torch.distributed.all_to_all_single is original


@pytest.mark.parametrize(
    ("nccl", "changed", "words"),
    [
        ((2, 30, 7), {"LAGOM_RECORD": ""}, "LAGOM_RECORD is not set in this rank: start the job with lagom run"),
        ((2, 30, 7), {"LAGOM_ROUTE": "magic"}, "LAGOM_ROUTE is 'magic'; allowed: plugin, sibling"),
        ((2, 16, 2), {}, "NCCL 2.16.2 lets nothing be set"),
    ],
)
def test_what_is_missing_is_named(environment, nccl, changed, words):
    with pytest.raises(JobError, match=words):
        open_nccl_route(MODEL, nccl, environment | changed)


@pytest.fixture
def world():
    """Makes the default process group, of one rank, as often as it is called."""

    def make():
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    yield make
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_second_tuner_of_a_process_is_refused_until_the_first_is_closed(environment, world):
    """The plug-in has one table: two tuners would overwrite each other's."""
    world()
    first = open_nccl_route(MODEL, (2, 30, 7), environment)
    with pytest.raises(JobError, match="another tuner of this process"):
        open_nccl_route(MODEL, (2, 30, 7), environment)
    first.close()
    second = open_nccl_route(MODEL, (2, 30, 7), environment)
    PLUGIN_OWNER.release(second)  # its tuner was closed, and what it has settled is still in force
    assert not second.is_closed
    third = open_nccl_route(MODEL, (2, 30, 7), environment)
    assert second.is_closed
    third.close()


def test_a_process_that_is_restarted_in_place_makes_its_tuner_again_and_starts_untouched(environment, world):
    plugin = TunerPlugin(Path(environment["NCCL_TUNER_PLUGIN"]))
    world()
    first = open_nccl_route(MODEL, (2, 30, 7), environment)
    plugin.install(encode_table(ConfigTable({}), generation=77).data)  # what it had found
    world()
    second = open_nccl_route(MODEL, (2, 30, 7), environment)
    assert first.is_closed
    assert plugin.generation == (1 << 64) - 1  # an empty table, and decided by
    second.close()


def test_a_job_whose_ranks_are_replaced_while_others_run_on_is_not_tuned(environment, monkeypatch):
    replaced = ReplacedRanks()
    monkeypatch.setattr(nccl_route, "REPLACED_RANKS", replaced)
    replaced.by = "torchft"
    with pytest.raises(JobError, match="a rank that joins would not know what is set"):
        open_nccl_route(MODEL, (2, 30, 7), environment)


def test_the_release_is_that_of_the_library_in_the_process_not_what_torch_was_compiled_with(monkeypatch):
    """A preloaded or replaced libnccl.so.2 is another one."""
    monkeypatch.setattr(device.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(device.dist, "get_backend_config", lambda: "cuda:nccl,cpu:gloo")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(device, "loaded_nccl", lambda: (2, 30, 7))
    assert nccl_in_use() == (2, 30, 7)
    monkeypatch.setattr(device, "loaded_nccl", lambda: None)
    assert nccl_in_use() == (2, 28, 9)


def test_a_machine_without_nccl_is_not_on_nccl():
    if torch.distributed.is_nccl_available():
        pytest.skip("this torch has NCCL")
    assert nccl_in_use() is None


def test_errors_of_ours_are_one_line_but_for_the_one_that_must_end_the_job(capsys):
    def fail(error):
        raise error

    for error in (LagomError("told\nin lines"), ZeroDivisionError("ours")):
        safely(lambda error=error: fail(error), ends_the_job=BackendError)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("(rank 0): ")[2] for line in lines] == ["told in lines", "ZeroDivisionError: ours"]
    with pytest.raises(BackendError):
        safely(lambda: fail(BackendError("could not switch")), ends_the_job=BackendError)
