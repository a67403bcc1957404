"""Saved settings and options: what is refused, in which words."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lagom_overlap.collective import CollectiveKind, CommConfig, CommunicatorId
from lagom_overlap.collective.sites import CallType, Site, SiteSetting, table_of
from lagom_overlap.errors import BundleError, OutputError
from lagom_overlap.export.saved import SavedSettings, read_saved, write_saved
from lagom_overlap.online.options import OnlineOptions, is_disabled

CALL = CallType(description="tp", num_ranks=2, creation_order=1, kind=CollectiveKind.ALL_GATHER, num_bytes=1 << 20)
SETTING = SiteSetting(Site(CALL, 3), CommConfig(num_channels=4, chunk_bytes=1 << 19))
SAVED = SavedSettings(
    world_size=4, route="gloo", is_adopted=True, settings=(SETTING,), verdict="tuned", date="2026-01-01T00:00:00Z"
)


def test_what_is_saved_comes_back_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "lagom.json"
    write_saved(path, SAVED)
    assert read_saved(path, world_size=4) == SAVED
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 9}, "version 9"),
        ({"format": "else"}, "format 'else'"),
        ({"world_size": "four"}, "damaged"),
        ({"unknown": 1}, "damaged"),
        ({"settings": [{}]}, "damaged"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    path = tmp_path / "lagom.json"
    write_saved(path, SAVED)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BundleError, match=words):
        read_saved(path)


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"[", b"{}", b"[" * 100_000])
def test_garbage_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "lagom.json"
    path.write_bytes(content)
    with pytest.raises(BundleError, match="damaged"):
        read_saved(path)


def test_another_world_size_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    write_saved(tmp_path / "lagom.json", SAVED)
    with pytest.raises(BundleError, match="were found with 4 ranks, this job has 8"):
        read_saved(tmp_path / "lagom.json", world_size=8)
    with pytest.raises(BundleError, match="cannot read"):
        read_saved(tmp_path / "none.json")


def test_a_file_that_cannot_be_written_is_an_error_and_leaves_no_part(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot write"):
        write_saved(tmp_path / "no" / "lagom.json", SAVED)


def test_a_role_is_set_on_the_communicator_that_this_rank_has_of_it() -> None:
    mine = [CommunicatorId(description="tp", ranks=(2, 3), creation_order=order) for order in (0, 1)]
    table = table_of([SETTING], [*mine, CommunicatorId(description="tp", ranks=(0, 1, 2), creation_order=1)])
    ((key, config),) = table
    assert key.communicator == mine[1]
    assert (key.occurrence, key.num_bytes, config) == (3, 1 << 20, SETTING.config)
    assert not len(table_of([SETTING], mine[:1]))


def test_every_communicator_of_a_role_is_set_alike() -> None:
    """A chain of pairs: with one of the two set, ranks 1 and 2 would run the calls of [1, 2] under other settings."""
    role = replace(CALL, creation_order=0)
    setting = replace(SETTING, site=Site(role, 3))
    pairs = [CommunicatorId(description="tp", ranks=ranks) for ranks in ((0, 1), (1, 2), (2, 3))]
    tables = [table_of([setting], [pair for pair in pairs if rank in pair.ranks]) for rank in range(4)]
    set_on = [{key.communicator for key, config in table if config == SETTING.config} for table in tables]
    assert set_on == [{pairs[0]}, {pairs[0], pairs[1]}, {pairs[1], pairs[2]}, {pairs[2]}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"window_steps": 3}, "window_steps is 3, must be at least 4"),
        ({"max_slowdown": 1.0}, "max_slowdown"),
        ({"num_pairs": 2}, "num_pairs is 2"),
        ({"watch_steps": 1}, "watch_steps"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"drift_ratio": 0.9, "drift_windows": 0}, "drift_ratio is 0.9.*drift_windows is 0"),
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OnlineOptions(**change)


@pytest.mark.parametrize(("value", "is_off"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_one_variable_switches_everything_off(monkeypatch: pytest.MonkeyPatch, value: str, is_off: bool) -> None:
    monkeypatch.setenv("LAGOM_DISABLE", value)
    assert is_disabled() is is_off
