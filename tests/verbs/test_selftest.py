"""The driver of the self-test on a stand-in: what it asks, keeps and saves, and how it ends."""

import csv
import json
from collections import Counter
from dataclasses import fields, replace
from itertools import count
from pathlib import Path

import pytest
from selftest_box import BOX, StandInBench, stand_in

from lagom_overlap.collective import Algorithm, CollectiveKind, CommConfig, Protocol
from lagom_overlap.cost.measured_surface import Point
from lagom_overlap.errors import BackendError
from lagom_overlap.nccl_plugin.capability import SettingOutcome, find_map, read_map
from lagom_overlap.report.selftest import closing_words
from lagom_overlap.results.selftest import SelfTestResult
from lagom_overlap.units import KIB, MIB
from lagom_overlap.verbs.selftest import SelfTestRequest, run_selftest


def run_on_stand_in(tmp_path: Path, bench: StandInBench | None = None, **changed: object) -> SelfTestResult:
    given: dict[str, object] = {
        "open_benches": stand_in(bench),
        "box": lambda: BOX,
        "clock": lambda: 0.0,
        "environment": {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    }
    request = SelfTestRequest(ranks_per_gpu=2, out=tmp_path / "out")
    return run_selftest(request, **(given | changed))  # type: ignore[arg-type]


def test_every_setting_is_told_as_asked_and_as_it_ran(tmp_path: Path) -> None:
    result = run_on_stand_in(tmp_path)
    assert (result.num_called, result.num_planned_calls) == (45, 45)  # 3 depths, 3 sizes, 5 kinds
    assert result.stopped == ""
    mine = [
        row
        for row in result.rows
        if (row.kind, row.num_bytes) == (CollectiveKind.ALL_REDUCE, 16 * MIB)
        and (row.asked.algorithm, row.asked.protocol) == (Algorithm.TREE, Protocol.SIMPLE)
    ]
    by_chunk = {row.asked.chunk_bytes: row for row in mine if row.asked.chunk_bytes}
    assert {size // KIB: by_chunk[size].outcome for size in by_chunk} == {
        64: SettingOutcome.AS_ASKED,
        128: SettingOutcome.AS_ASKED,
        256: SettingOutcome.AS_ASKED,
        512: SettingOutcome.AS_ASKED,
        1024: SettingOutcome.ALIASED,
        2048: SettingOutcome.ALIASED,
    }
    assert by_chunk[2 * MIB].ran.chunk_bytes == 512 * KIB
    by_channels = {row.asked.num_channels: row for row in mine if not row.asked.chunk_bytes}
    assert [by_channels[n].outcome for n in (1, 2, 4, 8, 16)] == [SettingOutcome.AS_ASKED] * 5
    assert by_channels[32].outcome is SettingOutcome.CLAMPED
    assert by_channels[32].ran.num_channels == 24


def test_no_setting_is_asked_twice_of_a_call(tmp_path: Path) -> None:
    seen = Counter((row.kind, row.num_bytes, row.asked) for row in run_on_stand_in(tmp_path).rows)
    assert set(seen.values()) == {1}


def test_the_map_is_saved_for_this_user_alone_and_found_by_the_ranks_of_a_communicator(tmp_path: Path) -> None:
    result = run_on_stand_in(tmp_path)
    folder = tmp_path / "cache" / "lagom-overlap" / "capability"
    assert result.map_path is not None
    assert result.map_path.parent == folder
    assert (folder.stat().st_mode & 0o777, result.map_path.stat().st_mode & 0o777) == (0o700, 0o600)
    found = find_map((2, 30, 7), BOX, num_ranks=2, folder=folder)
    assert found is not None
    assert (found.rows, found.max_channels) == (result.rows, 24)
    assert find_map((2, 30, 7), BOX, num_ranks=4, folder=folder) is None
    assert find_map((2, 29, 7), BOX, num_ranks=2, folder=folder) is None


def test_the_surface_has_the_columns_of_the_benchmark(tmp_path: Path) -> None:
    result = run_on_stand_in(tmp_path)
    with (tmp_path / "out" / "contention.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [field.name for field in fields(Point)]
    assert len(rows) == len(result.contention) == 18  # six counts of channels, three kinds
    assert json.loads((tmp_path / "out" / "selftest.json").read_text())["facts"]["nccl"] == [2, 30, 7]


def test_a_wrong_result_is_kept_and_nothing_is_built_on_a_box_where_every_result_is(tmp_path: Path) -> None:
    some = run_on_stand_in(tmp_path, StandInBench(lambda config: config.num_channels == 16))
    assert {row.asked.num_channels for row in some.wrong} == {16}
    assert some.map_path is not None
    again = tmp_path / "again"
    again.mkdir()
    every = run_on_stand_in(again, StandInBench(lambda _: True))
    assert len(every.wrong) == len(every.rows)
    assert every.map_path is None


def test_a_collective_that_a_library_lacks_is_refused_by_the_map_and_the_others_are_not(tmp_path: Path) -> None:
    class Cut(StandInBench):
        def measure(self, kind, num_bytes, configs):
            for reading in super().measure(kind, num_bytes, configs):
                yield replace(reading, is_right=kind is not CollectiveKind.REDUCE)

    result = run_on_stand_in(tmp_path, Cut())
    assert {row.kind for row in result.wrong} == {CollectiveKind.REDUCE}
    assert result.map_path is not None
    found = read_map(result.map_path)
    assert found.refuses(CollectiveKind.REDUCE, CommConfig(num_channels=8))
    assert found.refuses(CollectiveKind.BROADCAST, CommConfig(num_channels=8)) is None
    (line,) = [line for line in closing_words(result) if "every setting" in line]
    assert line.strip().startswith("reduce:")


def test_a_wrong_result_ends_with_exit_code_1_and_is_said_on_both_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lagom_overlap.cli import main, selftest

    for name, wrong, num_swaps, code in (("right", 0, 0, 0), ("setting", 16, 0, 1), ("swaps", 0, 3, 1)):
        bench = StandInBench(lambda config, wrong=wrong: config.num_channels == wrong)
        bench.num_wrong_swaps = num_swaps
        place = tmp_path / name
        place.mkdir()
        monkeypatch.setattr(
            selftest,
            "run_selftest",
            lambda _r, note, place=place, bench=bench: run_on_stand_in(place, bench, note=note),
        )
        assert main(["selftest", "--nccl"]) == code
        said = capsys.readouterr()
        assert ("WRONG RESULTS" in said.err) is bool(code)
        assert ("WRONG RESULTS" in said.out) is (name == "setting")
        assert "1200 tables swapped under traffic" in said.out
        assert all(len(line) <= 80 for line in said.out.splitlines() if "/" not in line)


def test_when_the_time_is_short_every_size_of_what_training_calls_comes_first(tmp_path: Path) -> None:
    ticks = count()
    result = run_on_stand_in(tmp_path, clock=lambda: next(ticks) * 40.0)  # ten minutes, 40 s a look at the clock
    asked = list(dict.fromkeys((row.kind, row.num_bytes) for row in result.rows))
    usual = {CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE}
    assert set(asked) == {(kind, size * MIB) for kind in usual for size in (1, 16, 128)}
    assert result.num_called < result.num_planned_calls
    assert "time for settings" in result.stopped
    assert result.overhead is not None
    assert 0 < len(result.contention) < 18


def test_an_interrupt_and_a_hang_keep_what_was_measured(tmp_path: Path) -> None:
    for error in (KeyboardInterrupt(), BackendError("it has not ended"), RuntimeError("CUDA error: out of memory")):

        class Ends(StandInBench):
            num_left = 4

            def offered(self, kind, num_bytes):
                self.num_left -= 1
                if not self.num_left:
                    raise error  # noqa: B023  used before the loop goes on
                return super().offered(kind, num_bytes)

        place = tmp_path / type(error).__name__
        place.mkdir()
        result = run_on_stand_in(place, Ends())
        assert result.num_called == 3
        assert (result.is_interrupted, result.has_failed) == (
            isinstance(error, KeyboardInterrupt),
            not isinstance(error, KeyboardInterrupt),
        )
        assert (place / "out" / "settings.csv").read_text().count("\n") == len(result.rows) + 1


def test_witnesses_that_disagree_about_channels_are_said(tmp_path: Path) -> None:
    class Disagrees(StandInBench):
        def measure(self, kind, num_bytes, configs):
            for reading in super().measure(kind, num_bytes, configs):
                yield replace(reading, grids=(7, 7) if reading.config.num_channels == 16 else reading.grids)

    result = run_on_stand_in(tmp_path, Disagrees())
    num = sum(row.asked.num_channels == 16 for row in result.rows)
    assert any(f"disagree about channels in {num} settings" in note for note in result.notes)
    assert result.map_path is not None


def test_an_interrupted_run_leaves_a_former_map_in_place(tmp_path: Path) -> None:
    whole = run_on_stand_in(tmp_path)
    assert whole.map_path is not None
    before = whole.map_path.read_bytes()

    class Interrupted(StandInBench):
        def host_s(self, *, is_on: bool) -> float:
            raise KeyboardInterrupt

    request = SelfTestRequest(ranks_per_gpu=2, out=tmp_path / "second")
    again = run_selftest(
        request,
        open_benches=stand_in(Interrupted()),
        box=lambda: BOX,
        environment={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert again.map_path is None
    assert whole.map_path.read_bytes() == before
    assert any("former run is kept" in note for note in again.notes)


def test_variables_that_limit_nccl_keep_the_map_out_of_the_cache(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NCCL_ALGO": "Ring"}
    result = run_on_stand_in(tmp_path, environment=environment)
    assert result.map_path is None
    assert any("NCCL_ALGO" in note for note in result.notes)
    assert not (tmp_path / "cache").exists()


def test_a_map_of_emulated_gpus_stays_out_of_the_cache_whatever_their_results(tmp_path: Path) -> None:
    """A box with such GPUs would go by it."""
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "LAGOM_EMULATION_SOCKET": "/tmp/clock"}
    result = run_on_stand_in(tmp_path, environment=environment)
    assert SettingOutcome.AS_ASKED in {row.outcome for row in result.rows}
    assert result.map_path is None
    assert any("these GPUs are emulated" in note for note in result.notes)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changed", "word"),
    [({"num_gpus": 0}, "--gpus"), ({"ranks_per_gpu": 9}, "--ranks-per-gpu"), ({"minutes": 0.0}, "--minutes")],
)
def test_flags_out_of_range_are_refused(changed: dict[str, float], word: str) -> None:
    with pytest.raises(BackendError, match=word):
        SelfTestRequest(**changed)  # type: ignore[arg-type]


def test_without_a_gpu_one_line_says_so_and_no_folder_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lagom_overlap.cli import main

    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(tmp_path)
    assert main(["selftest", "--nccl"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "no NVIDIA GPU" in err
    assert list(tmp_path.iterdir()) == []
    assert main(["selftest"]) == 2
    assert "--nccl" in capsys.readouterr().err
