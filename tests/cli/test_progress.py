"""Without a terminal a long verb writes a plain line every ten seconds; the clock is given."""

import io
import sys

import pytest

from lagom_overlap.cli.progress import EVERY_S, PlainLines


def test_a_line_every_ten_seconds_says_what_the_verb_is_at(capsys: pytest.CaptureFixture[str]) -> None:
    doing = iter(["search, 3 of 40", "search, 9 of 40", ""])
    waited: list[float] = []

    def wait(seconds: float) -> bool:
        waited.append(seconds)
        if said := next(doing):
            lines.update(said)
        return not said

    lines = PlainLines("tune", "starting", wait=wait)
    lines.write()
    assert waited == [EVERY_S] * 3
    assert capsys.readouterr().err == "lagom tune: search, 3 of 40 (10 s)\nlagom tune: search, 9 of 40 (20 s)\n"


def test_a_verb_that_is_quick_writes_nothing_and_leaves_no_thread(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainLines("plan", "planning") as lines:
        assert lines._thread is not None
    assert not lines._thread.is_alive()
    assert capsys.readouterr().err == ""


def test_a_terminal_has_the_verbs_own_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    with PlainLines("tune", "starting") as lines:
        assert lines._thread is None
