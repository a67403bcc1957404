"""The check of the profiler plug-in on a GPU, played without one: the real plug-in, under a played NCCL and clock."""

import ctypes
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from c_build import build_libraries
from played_profiler import CHANNEL, PlayedComm

from lagom_overlap.collective import CollectiveKind

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
EPOCH_NS, CUPTI_AHEAD_NS = 1_764_000_000_000_000_000, 5_000
FUNCTIONS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce"}


class World:
    """The GPU: a clock, and the kernels that ran. A kernel is 1.25 times as long as its blocks' own times say."""

    def __init__(self, plugin: Path) -> None:
        self.plugin, self.now_ns, self.kernels = plugin, EPOCH_NS, []

    def run(self, comm: PlayedComm | None, rank: int, kind: CollectiveKind, num_bytes: int) -> None:
        at, took = self.now_ns + 100 * rank, num_bytes // 1000
        if comm and comm.mask.value & CHANNEL:
            handle = comm.launch(FUNCTIONS[kind], num_bytes // 2, "ncclInt8", 2)
            comm.run(handle, {0: (at, at + took - 32), 1: (at + 32, at + took)})
        start_us = (at - EPOCH_NS + CUPTI_AHEAD_NS) / 1e3
        event = {"cat": "kernel", "name": "ncclDevKernel", "ts": start_us, "dur": 1.25 * took / 1e3}
        self.kernels.append(event | {"args": {"stream": 20 - rank}})


class PlayedRanks:
    """Stands where `LocalRanks` does."""

    world: World
    num_made = 0

    def __init__(self, nccl: object, **how: object) -> None:
        self.devices, self.streams = [0, 0], [0, 1]
        PlayedRanks.num_made += 1
        is_loaded = "NCCL_PROFILER_PLUGIN" in os.environ
        made = PlayedRanks.num_made
        self._ranks = [PlayedComm(self.world.plugin, 6, made, rank=r) if is_loaded else None for r in (0, 1)]

    def enqueue(self, kind: CollectiveKind, buffers: tuple[list[int], list[int]]) -> None:
        num_bytes = buffers[0][0]
        for rank, comm in enumerate(self._ranks):
            self.world.run(comm, rank, kind, num_bytes)
        self.world.now_ns += 2 * num_bytes // 1000

    def close(self) -> None:
        for comm in self._ranks:
            if comm:
                comm.finalize()


class Event:
    world: World

    def __init__(self, *, enable_timing: bool) -> None:
        self.at_ns = 0

    def record(self, stream: object) -> None:
        self.at_ns = self.world.now_ns

    def elapsed_time(self, other: "Event") -> float:
        return (other.at_ns - self.at_ns) * 1e-6


@pytest.fixture
def world(tmp_path_factory, tmp_path, monkeypatch: pytest.MonkeyPatch):
    plugin = tmp_path / "liblagom_tuner.so"
    plugin.write_bytes(build_libraries(tmp_path_factory)[0].read_bytes())
    world = World(plugin)

    class Profile:
        def __init__(self, **options: object) -> None:
            pass

        def __enter__(self) -> "Profile":
            world.kernels.clear()
            return self

        def __exit__(self, *_: object) -> None:
            self.events = list(world.kernels)

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text(json.dumps({"traceEvents": [{"cat": "cpu_op", "name": "x"}, *self.events]}))

    Event.world = PlayedRanks.world = world
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "played")
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    for name in ("NCCL_PROFILER_PLUGIN", "LAGOM_PROFILE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return world


@pytest.fixture
def script(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    module = import_module("profiler_check")
    monkeypatch.setattr(module, "NcclLibrary", lambda path: SimpleNamespace(code=23007))
    monkeypatch.setattr(module, "LocalRanks", PlayedRanks)
    monkeypatch.setattr(module, "make_buffers", lambda kind, num_bytes, devices: ([num_bytes] * 2, [num_bytes] * 2))
    monkeypatch.setattr(module, "poison", lambda buffers: None)
    monkeypatch.setattr(module, "wrong_rank", lambda kind, buffers: None)
    monkeypatch.setattr(module, "installed_library", lambda: world.plugin)
    monkeypatch.setattr(module, "NUM_BLOCKS", 2)

    def run_here(command: list[str], env: dict[str, str], **_: object) -> None:
        with monkeypatch.context() as patch:
            for name in set(os.environ) - set(env):
                patch.delenv(name)
            assert module.main(command[2:]) == 0

    monkeypatch.setattr(module.subprocess, "run", run_here)
    yield module
    sys.modules.pop("profiler_check", None)


def test_a_played_run_finds_the_known_ratios_and_switches_the_plug_in(script, world, tmp_path, capsys):
    out = tmp_path / "out"
    assert script.main(["--nccl-library", "libnccl.so.2", "--out", str(out)]) == 0
    found = json.loads((out / script.RESULT).read_text())
    rows = found["compared"]
    assert [(r["channels"], r["num_bytes"], r["kind"]) for r in rows] == [
        (channels, num_bytes, str(kind)) for channels in script.CHANNELS for num_bytes, kind in script.CASES
    ]
    for row in rows:
        assert (row["num_entries"], row["num_incomplete"], row["is_right"]) == (2 * script.NUM_COMPARED, 0, True)
        assert row["to_kernel"] == pytest.approx(0.8, rel=1e-3)
        assert row["to_event"] == pytest.approx(0.5, rel=1e-3)
        assert row["start_offset_iqr_ns"] == 0
    assert {(r["switch"], len(r["gpu_s"])) for r in found["timed"]} == {("on", 2), ("off", 2)}
    assert {(r["switch"], len(r["gpu_s"])) for r in found["without"]} == {("never", 2)}
    assert found["counters"] == {"dropped": 0, "late": 0}
    shown = capsys.readouterr().out
    assert "0 with a wrong result" in shown
    assert shown.count("0.8000") >= len(rows)


def test_missing_entries_fail_the_check_and_say_so(script, world, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script.time, "monotonic", iter(range(10**9)).__next__)  # no waiting for what never comes
    library = ctypes.CDLL(str(world.plugin))
    library.lagom_profile_enable(0)
    assert script.main(["--nccl-library", "libnccl.so.2", "--out", str(tmp_path), "--budget-s", "1000"]) == 1
    assert "calls of each rank: [0, 0] in our ring" in capsys.readouterr().out


def test_more_kernels_than_calls_are_refused(script):
    span = script.Span(1, 2)
    with pytest.raises(ValueError, match="calls of each rank"):
        script.paired([[span], [span]], [[span, span], [span]])
