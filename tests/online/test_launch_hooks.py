"""What the hooks of `lagom run --config` do about jobs that replace ranks, or begin anew in one process."""

import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from c_build import build_libraries
from job_of_threads import FakeStore

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId, ConfigKey, ConfigTable
from lagom_overlap.errors import BackendError
from lagom_overlap.export.plugin_table import checksum_of
from lagom_overlap.export.run_variables import TABLE_CHECKSUM_VARIABLE
from lagom_overlap.nccl_plugin.fake_host import FakeNccl, load_fake_library
from lagom_overlap.nccl_plugin.library import TunerPlugin
from lagom_overlap.nccl_plugin.table_writer import ProcessCommunicator, encode_table, write_table
from lagom_overlap.online import launch_fixed, launch_hooks, launch_observe, launch_session, one_setting
from lagom_overlap.online.replaced_ranks import ReplacedRanks
from lagom_overlap.units import MIB

AR = CollectiveKind.ALL_REDUCE


@pytest.fixture
def nccl(tmp_path_factory, tmp_path, monkeypatch):
    """NCCL with the plug-in, whose table sets the first communicator of eight ranks."""
    library, fake = build_libraries(tmp_path_factory)
    path = tmp_path / "liblagom_tuner.so"
    path.write_bytes(library.read_bytes())
    key = ConfigKey(communicator=CommunicatorId(description="dp", ranks=tuple(range(8))), kind=AR, num_bytes=64 * MIB)
    table = ConfigTable({key: CommConfig(num_channels=7)})
    data = encode_table(table, generation=1, communicators=[ProcessCommunicator(key.communicator)]).data
    write_table(tmp_path / "table.bin", data)
    for name in ("LAGOM_DISABLE", "LAGOM_RECORD", "NCCL_NET_PLUGIN", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LAGOM_CHAIN_TUNER", "none")
    monkeypatch.setenv("NCCL_TUNER_PLUGIN", str(path))
    monkeypatch.setenv("LAGOM_TABLE", str(tmp_path / "table.bin"))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    with FakeNccl(load_fake_library(fake), "2.30") as host:
        yield host


def channels(comm):
    return comm.run(AR, 64 * MIB).tuner_channels


TORCHFT = """
class Base:
    def __init__(self, rank, size): self.rank = rank
class ProcessGroup(Base):
    def __init__(self, *args): super().__init__(*args)
class ProcessGroupNCCL(ProcessGroup):
    def __init__(self, timeout): super().__init__(0, 1)
"""
RESILIENCY = """
class Wrapper:
    def __init__(self, **options): self.options = options
"""


@pytest.fixture
def frameworks(tmp_path, monkeypatch):
    """Packages with the classes of torchft and of NVIDIA's in-process restart that replace ranks."""
    files = {
        "torchft/__init__.py": "from torchft import process_group",
        "torchft/process_group.py": TORCHFT,
        "nvidia_resiliency_ext/__init__.py": "",
        "nvidia_resiliency_ext/inprocess/__init__.py": "from .wrap import Wrapper",
        "nvidia_resiliency_ext/inprocess/wrap.py": RESILIENCY,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(launch_hooks, "REPLACED_RANKS", ReplacedRanks())
    yield tmp_path
    for loaded in [each for each in sys.modules if each.split(".")[0] in ("torchft", "nvidia_resiliency_ext")]:
        del sys.modules[loaded]


MAKERS = {
    "torchft": lambda module: module.process_group.ProcessGroupNCCL(60),
    "nvidia_resiliency_ext.inprocess": lambda module: module.Wrapper(abort=None),
}


@pytest.mark.parametrize("framework", MAKERS)
@pytest.mark.parametrize("is_imported_before", [False, True])
def test_a_job_whose_ranks_are_replaced_decides_nothing_by_a_table(
    nccl, frameworks, capsys, framework, is_imported_before
):
    """The import alone changes nothing: torchtitan imports torchft wherever it is installed."""
    comm = nccl.comm()
    if is_imported_before:
        import_module(framework)
    launch_hooks.arm()
    module = import_module(framework)
    assert channels(comm) == 7
    assert capsys.readouterr().err == ""
    assert MAKERS[framework](module) is not None
    assert channels(comm) == 0
    assert channels(nccl.comm()) == 0
    MAKERS[framework](module)
    assert capsys.readouterr().err.count(f"--config is not applied: {framework} replaces ranks") == 1


def test_what_replaces_ranks_and_was_made_before_us_or_is_of_another_release_counts_as_met(frameworks):
    group = import_module("torchft").process_group.ProcessGroupNCCL(60)
    told = []
    replaced = ReplacedRanks()
    replaced.watch(told.append)
    assert (replaced.by, told, group.rank) == ("torchft", ["torchft"], 0)
    (frameworks / "nvidia_resiliency_ext" / "inprocess" / "wrap.py").write_text("Wrapper = None")
    replaced = ReplacedRanks()
    del group, sys.modules["torchft"], sys.modules["torchft.process_group"]
    replaced.watch()
    assert replaced.by == ""
    import_module("nvidia_resiliency_ext.inprocess")
    assert replaced.by == "nvidia_resiliency_ext.inprocess"


def begin_fixed(environment):
    return launch_fixed.Fixed(launch_fixed.plugin_of(environment), environment)


@pytest.mark.parametrize("saved_under", ["ours", "another", ""])
def test_settings_saved_under_another_engine_are_not_applied(nccl, tmp_path, monkeypatch, capsys, saved_under):
    monkeypatch.setattr(launch_fixed, "engine_in_use", lambda: "ours")
    monkeypatch.setattr(launch_fixed, "carved_out", lambda environment, rank: None)
    comm = nccl.comm()
    environment = {"NCCL_TUNER_PLUGIN": os.environ["NCCL_TUNER_PLUGIN"], "RANK": "0"}
    begin_fixed(environment | {"LAGOM_RUN_ENGINE": saved_under})
    assert channels(comm) == (7 if saved_under == "ours" else 0)
    assert ("--config is not applied" in capsys.readouterr().err) == (saved_under != "ours")


@pytest.mark.parametrize("lacks", [False, True])
def test_a_job_of_one_rank_and_each_rank_of_more_takes_the_table_from_memory_or_says_why_not(
    nccl, monkeypatch, capsys, lacks
):
    """Whose file it is does not matter; a file that is gone is no table, whatever NCCL's own loader took before."""
    monkeypatch.setattr(launch_fixed, "carved_out", lambda environment, rank: None)
    of_one = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1)
    for module in (launch_fixed, one_setting):
        monkeypatch.setattr(module, "dist", of_one)
    store = FakeStore()
    monkeypatch.setattr(one_setting, "store_of", lambda name, timeout_s: store)
    path = Path(os.environ["LAGOM_TABLE"])
    environment = {"NCCL_TUNER_PLUGIN": os.environ["NCCL_TUNER_PLUGIN"], "RANK": "0", "LAGOM_TABLE": str(path)}
    environment[TABLE_CHECKSUM_VARIABLE] = checksum_of(path.read_bytes())
    path.chmod(0o666)  # NCCL's own load of it is refused
    comm = nccl.comm()
    assert channels(comm) == 0
    if lacks:
        path.unlink()
    begin_fixed(environment)
    assert channels(comm) == (0 if lacks else 7)
    assert ("--config is not applied: rank 0: cannot read the table" in capsys.readouterr().err) == lacks


def gone(*_, **__):
    raise OSError("gone")


class StoreGone:
    def add(self, key, amount):
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("what", ["store", "files"])
def test_a_rank_that_fails_before_it_meets_the_others_decides_by_no_table(nccl, tmp_path, monkeypatch, what):
    """They miss its "yes" and run NCCL's own choice, and so must it, whatever NCCL's own loader took."""
    monkeypatch.setattr(launch_session, "nccl_in_use", lambda: (2, 30, 3))
    of_two = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 2, get_backend=lambda: "nccl")
    for module in (launch_session, launch_fixed, one_setting):
        monkeypatch.setattr(module, "dist", of_two)
    monkeypatch.setattr(one_setting, "store_of", lambda name, timeout_s: StoreGone())
    if what == "files":
        monkeypatch.setattr(launch_session, "JsonLines", gone)
    path = Path(os.environ["LAGOM_TABLE"])
    for name, value in {
        "LAGOM_RUN_MODE": "fixed",
        "LAGOM_RUN_FOLDER": str(tmp_path),
        "RANK": "0",
        TABLE_CHECKSUM_VARIABLE: checksum_of(path.read_bytes()),
    }.items():
        monkeypatch.setenv(name, value)
    comm = nccl.comm()
    assert channels(comm) == 7
    try:
        launch_session.begin_session(os.environ).close()
    except OSError:
        assert what == "files"
    assert channels(comm) == 0


@pytest.mark.parametrize(("size", "said"), [(64, ""), (8, "a row for none of rank 0's 2 collectives"), (0, "no call")])
def test_a_table_that_fits_nothing_the_job_calls_is_said_once(nccl, monkeypatch, capsys, size, said):
    monkeypatch.setattr(launch_fixed, "carved_out", lambda environment, rank: None)
    comm = nccl.comm()
    environment = {"NCCL_TUNER_PLUGIN": os.environ["NCCL_TUNER_PLUGIN"], "RANK": "0"}
    marking = begin_fixed(environment)
    for step in range(5):
        marking.on_step()
        if size and step < 3:
            comm.run(AR, size * MIB)
        if step == 1:
            assert capsys.readouterr().err == ""
    comm.run(AR, 4 * MIB)
    marking.close()
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == bool(said)


@pytest.mark.parametrize(("is_pipelined", "later"), [(False, 8), (True, 8), (False, 64)])
def test_what_rank_0_matches_says_nothing_of_other_stages_nor_of_later_calls(nccl, monkeypatch, is_pipelined, later):
    monkeypatch.setattr(launch_fixed, "carved_out", lambda environment, rank: None)
    monkeypatch.setattr(launch_fixed, "is_pipelined", lambda: is_pipelined)
    comm = nccl.comm()
    marking = begin_fixed({"NCCL_TUNER_PLUGIN": os.environ["NCCL_TUNER_PLUGIN"], "RANK": "0"})
    for _ in range(4):
        marking.on_step()
        comm.run(AR, 8 * MIB)
    comm.run(AR, later * MIB)
    marking.close()
    ending = marking.conclusion()
    if later == 64:
        assert (marking.why_void(), ending.found) == ("", "1 of 5 calls that NCCL asked about were set")
    else:
        assert ending.found == "nothing was set on rank 0"
        assert ("other stages" in ending.why) is is_pipelined
        assert bool(marking.why_void()) is not is_pipelined


def test_without_a_table_nothing_waits_for_them(monkeypatch):
    monkeypatch.delenv("LAGOM_TABLE", raising=False)
    waited = []
    monkeypatch.setattr(launch_hooks, "after_import", lambda name, then: waited.append(name))
    launch_hooks.arm()
    assert waited == [launch_hooks.GROUPS_MODULE]


def test_a_process_that_begins_anew_knows_its_communicators_as_a_new_one_does(nccl, monkeypatch):
    """Else a survivor would run without the table what a newcomer runs by it."""
    groups = ModuleType("groups")
    alive = SimpleNamespace(is_so=False)
    groups.is_initialized = lambda: alive.is_so

    def init_process_group():
        if alive.is_so:
            raise ValueError("trying to initialize the default process group twice!")
        alive.is_so = True

    groups.init_process_group = init_process_group
    begun, ended = [], []
    monkeypatch.setattr(launch_hooks, "_sessions", sessions := [])

    def begin():
        begun.append(len(begun))
        sessions.append(lambda: ended.append(begun[-1]))

    monkeypatch.setattr(launch_hooks, "_begin", begin)
    launch_hooks._wrap_groups(groups)
    groups.init_process_group()
    plugin = TunerPlugin(Path(os.environ["NCCL_TUNER_PLUGIN"]))
    assert [plugin.step(), plugin.step()] == [1, 2]
    first, second = nccl.comm(), nccl.comm()
    assert (channels(first), channels(second)) == (7, 0)
    with pytest.raises(ValueError, match="twice"):  # the job's own slip changes nothing
        groups.init_process_group()
    assert channels(nccl.comm()) == 0
    assert (begun, ended) == ([0], [])
    alive.is_so = False  # destroy_process_group
    groups.init_process_group()
    assert (begun, ended) == ([0, 1], [0])
    assert plugin.step() == 1
    assert (channels(nccl.comm()), channels(nccl.comm())) == (7, 0)


def test_the_job_has_its_own_function_back_where_no_table_decides(monkeypatch):
    monkeypatch.setenv("LAGOM_TABLE", "")
    groups = ModuleType("groups")
    groups.init_process_group = original = lambda: "made"
    monkeypatch.setattr(launch_hooks, "_begin", lambda: None)
    launch_hooks._wrap_groups(groups)
    assert groups.init_process_group() == "made"
    assert groups.init_process_group is original


def test_a_rank_that_cannot_know_whether_the_others_decide_by_the_table_ends_its_job(nccl, monkeypatch, capsys):
    """Any other error of ours is a line."""
    groups = ModuleType("groups")
    groups.init_process_group = lambda: "made"
    groups.is_initialized = lambda: False
    monkeypatch.setattr(launch_hooks, "_restart", lambda: None)
    errors = [ValueError("ours"), BackendError("in doubt"), BackendError("in doubt again")]

    def begin():
        raise errors.pop(0)

    monkeypatch.setattr(launch_hooks, "_begin", begin)
    launch_hooks._wrap_groups(groups)
    assert groups.init_process_group() == "made"
    assert "the job runs without us" in capsys.readouterr().err
    for _ in range(2):
        with pytest.raises(BackendError, match="in doubt"):
            groups.init_process_group()


@pytest.mark.parametrize(
    ("rank", "has_plugin", "is_written"), [(0, True, True), (0, True, False), (0, False, True), (1, True, True)]
)
def test_what_the_plugin_recorded_is_said_once_by_rank_0_if_there_is_a_plugin_and_a_record(
    monkeypatch, tmp_path, rank, has_plugin, is_written
):
    said, flushed = [], []
    record = tmp_path / "record.bin"
    if is_written:
        record.write_bytes(b"")
    monkeypatch.setattr(launch_observe, "say", said.append)
    monkeypatch.setattr(launch_observe, "report_lines", lambda shares, reason: "shares")
    monkeypatch.setattr(launch_observe, "read_record", lambda path: ("record of", path))
    monkeypatch.setattr(launch_observe, "record_lines", lambda found: found)
    ignored = SimpleNamespace(set=lambda *_, **__: None, flush=lambda: None, write=lambda *_, **__: None)
    observing = launch_observe.Observing(
        None,
        ignored,
        ignored,
        rank=rank,
        record=record,
        plugin=SimpleNamespace(flush_record=lambda: flushed.append(True)) if has_plugin else None,
    )
    observing.close()
    observing.close()
    is_recorded = rank == 0 and has_plugin and is_written
    assert said == (["shares"] if rank == 0 else []) + ([("record of", record)] if is_recorded else [])
    assert len(flushed) == is_recorded
