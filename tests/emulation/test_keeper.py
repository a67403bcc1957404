"""What the verb says of a keeper that could not do its work."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lagom_emulate import launch
from lagom_emulate.keeper import Order, keeper_command
from lagom_overlap.errors import JobError


def test_a_keeper_that_ends_before_it_starts_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "keeper_command", lambda report: [sys.executable, "-c", "raise SystemExit(5)"])
    monkeypatch.setattr(launch, "become_subreaper", lambda: None)
    folder = launch.JobFolder(path=Path("none"))
    with pytest.raises(JobError, match="cannot run 'true': its keeper ended with code 5"):
        launch.LaunchedJob(["true"], [{"LAGOM_EMULATION_SOCKET": "none"}], folder, quiet_stdout=False)


@pytest.mark.parametrize(("told", "is_kept"), [(b"end\n", True), (b"", False)])
def test_a_folder_is_the_verbs_to_remove_unless_it_has_gone(tmp_path: Path, told: bytes, is_kept: bool) -> None:
    """Also where the command cannot be started: the verb hears of it and ends its keepers itself."""
    folder = tmp_path / "job"
    folder.mkdir()
    order = Order(
        verb=os.getpid(),
        command=[str(tmp_path / "none")],
        environment={},
        folder=str(folder),
        quiet_stdout=False,
        grace_s=1.0,
    )
    ours, theirs = os.pipe()
    keeper = subprocess.Popen(keeper_command(theirs), stdin=subprocess.PIPE, pass_fds=(theirs,), start_new_session=True)
    os.close(theirs)
    assert keeper.stdin is not None
    keeper.stdin.write(order.encoded())
    keeper.stdin.flush()
    with os.fdopen(ours, "rb") as reports:
        assert reports.readline() == f"failed {errno.ENOENT}\n".encode()
    keeper.stdin.write(told)
    keeper.stdin.close()
    assert keeper.wait(30) == 0
    assert folder.exists() is is_kept
