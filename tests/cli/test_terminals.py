"""What reaches stdout and stderr, whatever they are: wide, narrow, without a size, not UTF-8, full, closed."""

import io
import json
import os
import pty
import subprocess
import sys

import pytest
from rich.panel import Panel
from rich.text import Text

from lagom_overlap.cli import main, output

LAGOM = (sys.executable, "-m", "lagom_overlap")
SENTENCE = "Tuned is 1.18× faster (quartiles 1.15–1.21): channels 8 → 2, −3.3 %"


def printed(monkeypatch: pytest.MonkeyPatch, encoding: str, *renderables: object) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    output.show(*renderables)  # type: ignore[arg-type]
    return raw.getvalue().decode(encoding)


def test_a_terminal_that_says_no_size_is_taken_for_one_of_80_columns():
    leader, follower = pty.openpty()  # a new pseudo-terminal has 0 columns, as under `docker exec -t`
    assert os.get_terminal_size(follower).columns == 0
    with subprocess.Popen((*LAGOM, "doctor"), stdin=subprocess.DEVNULL, stdout=follower) as process:
        os.close(follower)
        seen = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            seen += part
    os.close(leader)
    assert process.returncode == 0
    assert b"tuner plug-in" in seen
    assert b"just_enough" in seen


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_terminal_that_is_not_utf_8_gets_the_same_words_in_its_own_characters(monkeypatch, encoding):
    text = printed(monkeypatch, encoding, Panel(Text(SENTENCE), width=80))
    assert "Tuned is 1.18x faster (quartiles 1.15-1.21): channels 8 > 2, -3.3 %" in text
    assert {len(line) for line in text.rstrip("\n").splitlines()} == {80}


def test_utf_8_keeps_its_characters(monkeypatch):
    assert SENTENCE in printed(monkeypatch, "utf-8", Text(SENTENCE))


def test_json_on_a_terminal_that_is_not_utf_8_is_escaped_and_still_json(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    output.say(json.dumps({"name": "größer → 🚄"}, ensure_ascii=False))
    assert json.loads(raw.getvalue())["name"] == "größer → 🚄"


def test_a_full_disk_behind_help_is_no_bug_of_ours():
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run((*LAGOM, "--help"), stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "No space left" in done.stderr


def test_a_mistake_is_exit_code_2_also_where_stderr_is_full():
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        assert subprocess.run((*LAGOM, "nonsense"), stderr=full, check=False).returncode == 2


def test_an_unknown_flag_points_to_the_help_of_its_verb(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--gpu"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "lagom doctor: unrecognized arguments: --gpu; see 'lagom doctor --help'\n"
