"""The self-test's tables at the widths that terminals have."""

import io

import pytest
from rich.console import Console, RenderableType

from lagom_overlap.collective import Algorithm, CollectiveKind, Protocol
from lagom_overlap.cost.measured_surface import InjectorSetting, Point, TimeSpread
from lagom_overlap.nccl_plugin.capability import Knobs, MapRow, SettingOutcome
from lagom_overlap.report.selftest import contention_table, settings_table
from lagom_overlap.units import KIB, MIB

TREE = (Algorithm.TREE, Protocol.SIMPLE)


def row(asked: Knobs, ran: Knobs, outcome: SettingOutcome, time_s: float = 1e-3) -> MapRow:
    kind = CollectiveKind.ALL_REDUCE
    return MapRow(kind=kind, num_bytes=16 * MIB, asked=asked, ran=ran, outcome=outcome, time_s=time_s)


ROWS = (
    row(Knobs(), Knobs(Algorithm.RING, Protocol.SIMPLE, 64), SettingOutcome.AS_ASKED),
    row(Knobs(*TREE, 8), Knobs(*TREE, 8), SettingOutcome.AS_ASKED, 9.9e-4),
    row(Knobs(*TREE, 32), Knobs(*TREE, 24), SettingOutcome.CLAMPED, 8e-4),
    row(Knobs(*TREE, 8, 2 * MIB), Knobs(*TREE, 8, 512 * KIB), SettingOutcome.ALIASED, 1.29e-3),
    row(Knobs(Algorithm.RING, Protocol.LL128, 16), Knobs(Algorithm.RING, Protocol.LL128, 16), SettingOutcome.WRONG),
)


def printed(width: int, what: RenderableType) -> str:
    page = io.StringIO()
    Console(file=page, width=width).print(what)
    return page.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_asked_ran_and_time_are_there_at_every_width_and_no_line_is_too_long(width: int) -> None:
    text = printed(width, settings_table(ROWS))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    for each in ("all_reduce", "16 MiB", "tree/simple", "ring/ll128", "800 us", "1.29 ms", "WRONG"):
        assert each in text
    assert "…" not in text


def test_what_was_clamped_is_said_with_what_it_became() -> None:
    text = words(printed(200, settings_table(ROWS)))
    assert "ch. 32 ran 24 ch." in text
    assert "2 MiB ran 512 KiB" in text
    ring = (Algorithm.RING, Protocol.LL128)
    some = [*ROWS, row(Knobs(*ring, 8), Knobs(*ring, 8), SettingOutcome.AS_ASKED)]
    assert "1 as asked; WRONG RESULT with 16 channels" in words(printed(200, settings_table(some)))


def test_what_became_the_same_is_put_together_and_what_is_all_wrong_is_said_once() -> None:
    ring = (Algorithm.RING, Protocol.SIMPLE)
    capped = [row(Knobs(*ring, n), Knobs(*ring, 64), SettingOutcome.CLAMPED) for n in (1, 2, 4, 8)]
    assert "ch. 1 to 8 (4) ran 64 ch." in words(printed(200, settings_table(capped)))
    wrong = [row(Knobs(*ring, n), Knobs(*ring, n), SettingOutcome.WRONG) for n in (1, 2, 4, 8)]
    assert "WRONG RESULTS, all 4" in words(printed(200, settings_table(wrong)))


@pytest.mark.parametrize("width", [60, 80])
def test_the_contention_is_one_small_table(width: int) -> None:
    def point(kind: str, channels: int, *, covered: bool) -> Point:
        setting = InjectorSetting(injector=kind, num_channels=channels, num_ranks=2, message_bytes=MIB)
        slow, alone = TimeSpread.of([3e-4, 3e-4]), TimeSpread.of([2e-4, 2e-4])
        return Point.build("nccl", "gemm", setting, during=slow, solo=alone, covered=covered)

    points = [
        point(kind, channels, covered=channels < 8)
        for channels in (1, 8)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    ]
    lines = printed(width, contention_table(points)).splitlines()
    assert len(lines) == 3
    assert max(len(line.rstrip()) for line in lines) <= width
    assert lines[1].split() == ["1", "1.50×", "1.50×", "1.50×"]
    assert lines[2].split() == ["8", "1.50×", "?", "1.50×", "?", "1.50×", "?"]  # the collective ended too early
