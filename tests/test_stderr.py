"""Lines on a stderr that is closed, full, or the job's own."""

import io
import os
import subprocess
import sys

import pytest

from lagom_overlap.stderr import write_lines


class Broken(io.StringIO):
    """A stream of a job's that raises what no stream should."""

    def write(self, text: str) -> int:
        raise KeyError(text)


@pytest.mark.parametrize("stream", [None, Broken()])
def test_no_stream_of_a_job_makes_a_line_raise(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    write_lines("one", "two")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("where", ["2>/dev/full", "2>&-", ">&- 2>&-"])
def test_a_line_that_is_lost_changes_no_exit_code(where: str, unbuffered: str) -> None:
    words = "from lagom_overlap.stderr import write_lines; write_lines('lost'); import sys; sys.exit(5)"
    command = ["sh", "-c", f'exec {sys.executable} -c "{words}" {where}']
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    assert subprocess.run(command, env=environment, check=False).returncode == 5


def test_a_line_follows_what_the_job_has_written_and_keeps_its_letters() -> None:
    words = "import sys; from lagom_overlap.stderr import write_lines; "
    words += r"sys.stderr.write('job: '); write_lines('für', '\udc80')"
    environment = os.environ | {"PYTHONUNBUFFERED": "", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", words], env=environment, check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"job: f\\xfcr\n\\udc80\n")


def test_what_would_end_a_line_or_steer_a_terminal_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("files in a\nb\x1b[31m")
    assert capsys.readouterr().err == "files in a\\nb\\x1b[31m\n"


def test_lines_end_where_the_next_begins(capsys: pytest.CaptureFixture[str]) -> None:
    write_lines("one", "two")
    assert capsys.readouterr().err == "one\ntwo\n"
