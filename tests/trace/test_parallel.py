"""Reading in several processes: trace/parallel.py and read_traces with num_jobs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from kineto_traces import KinetoFile

from lagom_overlap.errors import TraceError
from lagom_overlap.trace import reader
from lagom_overlap.trace.parallel import read_in_processes
from lagom_overlap.trace.reader import ReadProgress, read_traces


def rank_file(folder: Path, rank: int) -> Path:
    file = KinetoFile(distributedInfo={"rank": rank, "world_size": 3})
    for n in range(20 + rank):
        file.kernel("gemm", 100.0 + 10 * n, 5)
    return file.write(folder / f"rank{rank}.json")


def lengths(path: Path) -> Iterator[int]:
    if path.name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if path.name == "broken":
        raise TraceError("broken")
    yield len(path.name)


def test_processes_give_the_same_traces_in_the_same_order(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_MIN_PARALLEL", 0)
    paths = [rank_file(tmp_path, rank) for rank in (2, 0, 1)]
    heard: list[ReadProgress] = []
    alone, together = read_traces(paths), read_traces(paths, None, heard.append, num_jobs=2)
    assert [trace.rank for trace in together] == [0, 1, 2]
    for one, other in zip(alone, together, strict=True):
        assert one.file == other.file
        assert np.array_equal(one.events.start_ns, other.events.start_ns)
    assert (heard[-1].num_done, heard[-1].num_files) == (3, 3)
    assert sum(each.trace is not None for each in heard) == 3


def test_an_error_in_a_process_is_raised_here():
    with pytest.raises(TraceError, match="broken"):
        list(read_in_processes([Path("a"), Path("broken")], lengths, 2))


def test_a_process_that_is_killed_is_an_error_that_names_its_file():
    with pytest.raises(TraceError, match=r"killed: the process .* out of memory"):
        list(read_in_processes([Path("killed"), Path("a")], lengths, 2))


def test_more_files_than_processes_are_all_read():
    found = [item for item in read_in_processes([Path("x" * n) for n in range(1, 8)], lengths, 2) if item[1]]
    assert sorted(found) == [(n, n + 1) for n in range(7)]


def running(group):
    """Processes of a group that have not ended; one that nobody waited for (a zombie) has."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, member = status.read_text().rpartition(")")[2].split()[:3]
            if int(member) == group and state not in "ZX":
                yield status.parent.name


def test_ctrl_c_ends_every_process_quietly(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(
        "import signal, sys, time\nfrom pathlib import Path\n"
        "from lagom_overlap.trace.parallel import read_in_processes\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "def read(path):\n    yield 1\n    time.sleep(600)\n"
        "if __name__ == '__main__':\n    try:\n        for _ in read_in_processes([Path('a'), Path('b')], read, 2):\n"
        "            print('started', flush=True)\n    except KeyboardInterrupt:\n        print('interrupted')\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout.readline() == "started\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate()
    assert out.endswith("interrupted\n")
    assert err == ""
    while any(running(process.pid)):  # the test's timeout ends it
        time.sleep(0.1)
